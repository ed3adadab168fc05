"""`forewarn ls`: the runs in a directory."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from forewarn.store.run_summary import Summary

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
    from forewarn.cli.terminal import Failure, from_run, output, show
    from forewarn.store import list_runs
    from forewarn.store.run_summary import kept_summary, summary_of
    from forewarn.views.wording import literal

    if not os.path.isdir(runs):  # unlike Path's it never raises
        raise Failure(f"there is no directory {runs}; give the one that holds your runs, or make a run: forewarn demo")
    paths = list_runs(runs)
    if not paths:
        raise Failure(f"there are no runs in {runs}; make one: forewarn demo --run {runs / 'demo'}")
    unreadable: list[str] = []
    rows: list[list[Text]] = []
    for path in paths:
        try:
            rows.append(_row(path, kept_summary(path) or from_run(path, summary_of)))
        except Failure as error:
            unreadable.append(str(error))
    errors = [f"\nunreadable: {literal(reason)}" for reason in unreadable]
    console = output()
    show(_table(rows, console.width), *errors, "\nJudge one: forewarn check RUN", console=console)


def _table(rows: list[list[Text]], width: int) -> Table:
    """The names, which take more lines where there is little room, and beside them all other cells, side by side.

    Rich would take a second to lay out some thousand rows of them.
    """
    from rich.text import Text

    from forewarn.cli.terminal import quiet_table

    table = quiet_table()
    first = 1 if width >= WIDE else 2
    names = COLUMNS[first - 1 :]
    columns = list(zip([Text(name, style="dim") for name in names], *(row[first:] for row in rows), strict=True))
    for name, column in zip(names, columns, strict=True):
        widest = max(cell.cell_len for cell in column)
        for cell in column:
            cell.align("right" if name in NUMBERS else "left", widest)
    heading, *lines = map(Text("  ").join, zip(*columns, strict=True))
    table.add_column("run", style="bold", overflow="fold")
    table.add_column(heading, no_wrap=True)
    for row, line in zip(rows, lines, strict=True):
        table.add_row(row[0], line)
    return table


def _row(path: Path, summary: Summary) -> list[Text]:
    from rich.text import Text

    from forewarn.standing import run_state
    from forewarn.types import in_words, num_words
    from forewarn.views.wording import STYLES, short

    state, counts = run_state(summary.end, summary.updated), summary.num_alerts
    return [
        Text(short(str(path))),
        Text(short(summary.model)),
        Text(str(summary.num_steps)),
        Text("–" if summary.last_loss is None else in_words(summary.last_loss)),
        Text(state, style=_STYLES[state]),
        Text(num_words(counts) or "none", style=STYLES[max(counts)] if counts else "dim"),
        Text(_age(summary.updated), style="dim"),
    ]


def _age(then: float) -> str:
    """How long ago, in the largest unit that fits: `3 minutes`."""
    seconds = max(0.0, time.time() - then)
    name, size = next(((name, size) for name, size in _UNITS if seconds >= size), _UNITS[-1])
    count = int(seconds // size)
    return f"{count} {name}" + ("" if count == 1 else "s")
