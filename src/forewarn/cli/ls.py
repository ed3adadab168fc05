"""`forewarn ls`: the runs in a directory."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.text import Text

    from forewarn.store import Run

SILENT_SECONDS = 600.0
"""A run that was not closed and recorded nothing for so long was probably killed."""
COLUMNS = ("model", "steps", "last loss", "state", "alerts", "age")
"""Beside the name of the run."""
NUMBERS = ("steps", "last loss")
WIDE = 100
"""Columns of a terminal from which on the model fits in beside a name."""
_UNITS = (("day", 86400.0), ("hour", 3600.0), ("minute", 60.0), ("second", 1.0))
_STYLES = {"running": "cyan", "completed": "green", "failed": "red", "interrupted": "yellow"}


@click.command()
@click.argument("runs", type=click.Path(path_type=Path), default="runs", required=False)
def command(runs: Path) -> None:
    """List the runs in a directory, the newest first.

    RUNS is the directory to look in, `runs` by default.

    \b
    Examples:
      forewarn ls
      forewarn ls /data/experiments
    """
    from forewarn.cli.terminal import Failure, output, quiet_table, show
    from forewarn.store import list_runs
    from forewarn.views.wording import literal

    if not os.path.isdir(runs):  # unlike Path's it never raises
        raise Failure(f"there is no directory {runs}; give the one that holds your runs, or make a run: forewarn demo")
    paths = list_runs(runs)
    if not paths:
        raise Failure(f"there are no runs in {runs}; make one: forewarn demo --run {runs / 'demo'}")
    table = quiet_table()
    table.add_column("run", style="bold", overflow="fold")  # where there is little room, long names take more lines
    is_wide = (console := output()).width >= WIDE
    for name in COLUMNS if is_wide else COLUMNS[1:]:
        table.add_column(name, justify="right" if name in NUMBERS else "left", no_wrap=True)
    unreadable: list[str] = []
    for path in paths:
        try:
            run, model, *cells = _row(path)
            table.add_row(run, *([model] if is_wide else []), *cells)
        except Failure as error:
            unreadable.append(str(error))
    errors = [f"\nunreadable: {literal(reason)}" for reason in unreadable]
    show(table, *errors, "\nJudge one: forewarn check RUN", console=console)


def _row(path: Path) -> list[Text]:
    from rich.text import Text

    from forewarn.cli.terminal import opened
    from forewarn.types import counted, in_words
    from forewarn.views.wording import STYLES, short

    with opened(path) as run:
        has_loss = "train/loss" in run.names()
        losses = run.series("train/loss").values.tolist() if has_loss else []
        alerts, state = run.alerts(), state_of(run)
        worst = max((alert.severity for alert in alerts), default=None)
        return [
            Text(short(str(path))),
            Text(short(run.info.model)),
            Text(str(run.num_steps)),
            Text(in_words(losses[-1]) if losses else "–"),
            Text(state, style=_STYLES[state]),
            Text(counted(alerts) or "none", style=STYLES[worst] if worst else "dim"),
            Text(_age(run.updated or run.info.started), style="dim"),
        ]


def state_of(run: Run) -> str:
    """running, completed, failed (an error ended it) or interrupted (stopped by hand, or killed)."""
    if run.end is None:
        silent = time.time() - (run.updated or run.info.started)
        return "interrupted" if silent > SILENT_SECONDS else "running"
    reason = run.end[0]
    if reason.startswith(("KeyboardInterrupt", "interrupted", "SystemExit")):
        return "interrupted"
    return "completed" if reason == "completed" else "failed"


def _age(then: float) -> str:
    """How long ago, in the largest unit that fits: `3 minutes`."""
    seconds = max(0.0, time.time() - then)
    name, size = next(((name, size) for name, size in _UNITS if seconds >= size), _UNITS[-1])
    count = int(seconds // size)
    return f"{count} {name}" + ("" if count == 1 else "s")
