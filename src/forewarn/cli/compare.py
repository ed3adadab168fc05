"""`forewarn compare`: runs side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from string import ascii_uppercase
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

MOST_ROWS = 10
"""Maximum number of rows of a table; --json has them all."""


@click.command()
@click.argument("runs", type=click.Path(path_type=Path), nargs=-1, required=True, metavar="A B [C ...]")
@click.option("--json", "wants_json", is_flag=True, help="Print one JSON object and nothing else.")
def command(runs: tuple[Path, ...], wants_json: bool) -> None:
    """Compare runs: what differs in their settings, where they part, how they end.

    The other runs are compared with A. They part where their losses, smoothed, differ by more than the spread of both
    and stay apart.

    \b
    Examples:
      forewarn compare runs/demo runs/demo-saved
      forewarn compare runs/a runs/b runs/c --json | jq .part.step
    """
    from forewarn.cli.terminal import Failure, opened, print_json, show
    from forewarn.store import ResumedError
    from forewarn.views.comparison import MOST_RUNS, compare

    if not 2 <= len(runs) <= MOST_RUNS:
        raise click.UsageError(f"name 2 to {MOST_RUNS} runs to compare")
    try:
        with ExitStack() as stack:
            compared = compare([stack.enter_context(opened(path)).freeze() for path in runs], list(map(str, runs)))
    except ResumedError as error:
        raise Failure(str(error)) from error
    if wants_json:
        print_json(compared)
    else:
        show(*_parts(compared))


def _parts(compared: Mapping[str, Any]) -> list[RenderableType]:
    """The sentences, then the tables behind them; each run has a letter."""
    from rich.padding import Padding
    from rich.text import Text

    from forewarn.types import in_words
    from forewarn.views.wording import short

    runs = compared["runs"]
    letters = ascii_uppercase[: len(runs)]
    legend = [Text.assemble((f"{letter}  ", "bold"), short(run["run"]), (f"  {run['words']}", "dim"))
              for letter, run in zip(letters, runs, strict=True)]  # fmt: skip
    parts: list[RenderableType] = [*legend, Text(), *(Text(sentence) for sentence in compared["words"])]
    losses = [{"key": name, "values": [row[name] for row in compared["losses"]]} for name in ("first", "best", "last")]
    layers = [{"key": f"{short(row['scope'])} {row['metric']}", "values": row["values"]} for row in compared["layers"]]
    alerts = [{"key": f"{row['name']} {row['code']}", "values": row["fired"]} for row in compared["alerts"]]
    tables = {
        "Loss": losses,
        "Settings": compared["config"],
        "Environment": compared["environment"],
        "Alerts, first step": alerts,
        "Layers that differ most at the end": layers,
    }
    for title, rows in tables.items():
        if rows:
            table = _table(letters, rows[:MOST_ROWS], in_words)
            parts += [Text(), Text(title, style="bold"), Padding(table, (0, 0, 0, 2))]
            if len(rows) > MOST_ROWS:
                parts.append(Text(f"  and {len(rows) - MOST_ROWS} more: --json lists them", style="dim"))
    return parts


def _table(letters: str, rows: Sequence[Mapping[str, Any]], words: Any) -> Table:
    from rich.text import Text

    from forewarn.cli.terminal import quiet_table

    table = quiet_table()
    table.add_column("", overflow="fold")
    for letter in letters:
        table.add_column(letter, justify="right", overflow="fold")
    for row in rows:
        cells = ("–" if value is None else words(value) for value in row["values"])
        table.add_row(Text(str(row["key"])), *map(Text, cells))
    return table
