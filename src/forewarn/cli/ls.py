"""`forewarn ls`: the runs in a directory."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.text import Text

    from forewarn.store.run_summary import Summary
    from forewarn.types import Severity

COLUMNS = ("model", "steps", "last loss", "state", "alerts", "age")
"""Columns after the name of the run."""
NUMBERS = ("steps", "last loss")
DISPENSABLE = ("model", "age", "last loss", "alerts", "steps")
"""Columns to drop on a narrow terminal, in this order."""
GAP = "  "
SHORT_NAME = 20
"""Minimum width of the names; a column is dropped if less would be left for them."""
WIDE = 100
"""Minimum terminal width to list alerts of every severity."""
WIDEST_MODEL = 24
_UNITS = (("day", 86400.0), ("hour", 3600.0), ("minute", 60.0), ("second", 1.0))
_STYLES = {
    "running": "cyan", "stalled": "yellow", "completed": "green", "failed": "red", "interrupted": "yellow",
    "imported": "dim",
}  # fmt: skip


@click.command()
@click.argument("runs", type=click.Path(path_type=Path), default="runs", required=False)
@click.option("--json", "wants_json", is_flag=True, help="Print one JSON list and nothing else.")
def command(runs: Path, wants_json: bool) -> None:
    """List the runs in a directory, newest first.

    RUNS is the directory to search, `runs` by default.

    \b
    Examples:
      forewarn ls
      forewarn ls /data/experiments
      forewarn ls --json | jq -r '.[] | select(.state == "failed").path'
    """
    from forewarn.cli.terminal import Failure, from_run, output, print_json, show
    from forewarn.store import list_runs
    from forewarn.store.run_summary import kept_summary, summary_of
    from forewarn.views.wording import literal

    if not os.path.isdir(runs):  # unlike Path.is_dir, it never raises
        raise Failure(f"no such directory: {runs}; pass the one that holds your runs, or create a run: forewarn demo")
    summaries: dict[Path, Summary] = {}
    unreadable: dict[Path, str] = {}
    for path in list_runs(runs):
        try:
            summaries[path] = kept_summary(path) or from_run(path, summary_of)
        except Failure as error:
            unreadable[path] = str(error)
    if wants_json:
        broken = [{"path": str(path), "error": reason} for path, reason in unreadable.items()]
        print_json([*(_as_json(path, summary) for path, summary in summaries.items()), *broken])
        return
    if not summaries and not unreadable:
        raise Failure(f"no runs in {runs}; create one: forewarn demo --run {runs / 'demo'}")
    console = output()
    lines = _lines([_row(path, summary, console.width >= WIDE) for path, summary in summaries.items()], console.width)
    errors = [f"\nunreadable: {literal(reason)}" for reason in unreadable.values()]
    show(*lines, *errors, "\nNext: forewarn check RUN", console=console)


def _as_json(path: Path, summary: Summary) -> dict[str, Any]:
    return {
        "path": str(path),
        "model": summary.model,
        "num_steps": summary.num_steps,
        "last_step": summary.last_step,
        "last_loss": summary.last_loss,
        "state": summary.state,
        "end": summary.end,
        "alerts": {str(severity): count for severity, count in summary.num_alerts.items()},
        "updated": summary.updated,
    }


def _lines(rows: Sequence[Sequence[Text]], width: int) -> Iterator[Text]:
    """A table that splits no name: one that is too long for its column gets a separate line.

    rich would take a second to lay out a few thousand rows.
    """
    from rich.text import Text

    table = [[Text(name, style="dim") for name in ("run", *COLUMNS)], *rows]
    columns = {column: [row[index] for row in table] for index, column in enumerate(("run", *COLUMNS))}
    names = columns.pop("run")
    widths = {column: max(cell.cell_len for cell in cells) for column, cells in columns.items()}
    needed = min(SHORT_NAME, max(cell.cell_len for cell in names))
    for column in DISPENSABLE:
        if _room(widths, width) < needed:
            del widths[column]
    room = _room(widths, width)
    widest = max((cell.cell_len for cell in names if cell.cell_len <= room), default=0)
    for index, name in enumerate(names):
        rest = Text(GAP).join([_aligned(columns[column][index], column, widths[column]) for column in widths])
        if name.cell_len <= widest:
            yield Text.assemble(name, " " * (widest - name.cell_len), GAP, rest)
        else:
            yield _fitted(name, width)
            yield Text.assemble(" " * widest, GAP, rest)


def _room(widths: dict[str, int], width: int) -> int:
    """Columns left for the names."""
    return width - sum(len(GAP) + other for other in widths.values())


def _aligned(cell: Text, column: str, width: int) -> Text:
    cell = cell.copy()
    cell.align("right" if column in NUMBERS else "left", width)
    return cell


def _fitted(name: Text, width: int) -> Text:
    """A name cut to fit the terminal, in the middle where it matters least."""
    from rich.cells import set_cell_size
    from rich.text import Text

    if name.cell_len <= width:
        return name
    half = (width - 1) // 2
    start, end = set_cell_size(name.plain, half), set_cell_size(name.plain[::-1], half)[::-1]
    return Text(f"{start}…{end}", style=name.style)


def _row(path: Path, summary: Summary, is_wide: bool = True) -> list[Text]:
    from rich.text import Text

    from forewarn.types import in_words, num_words
    from forewarn.views.wording import STYLES, literal

    state, counts = summary.state, summary.num_alerts
    return [
        Text(literal(str(path)), style="bold"),
        _fitted(Text(literal(summary.model)), WIDEST_MODEL),
        Text(str(summary.num_steps)),
        Text("–" if summary.last_loss is None else in_words(summary.last_loss)),
        Text(state, style=_STYLES[state]),
        Text(
            (num_words(counts) if is_wide else _worst(counts)) or "none", style=STYLES[max(counts)] if counts else "dim"
        ),
        Text(_age(summary.updated), style="dim"),
    ]


def _worst(counts: Mapping[Severity, int]) -> str:
    """The number of alerts at the worst severity, and of all others: `2 critical + 5`."""
    from forewarn.types import num_words

    if not counts:
        return ""
    worst = max(counts)
    others = sum(counts.values()) - counts[worst]
    return num_words({worst: counts[worst]}) + (f" + {others}" if others else "")


def _age(then: float) -> str:
    """How long ago, in the largest unit that fits: `3 minutes`; a dash if that is not known."""
    if not then > 0:
        return "–"
    seconds = max(0.0, time.time() - then)
    name, size = next(((name, size) for name, size in _UNITS if seconds >= size), _UNITS[-1])
    count = int(seconds // size)
    return f"{count} {name}" + ("" if count == 1 else "s")
