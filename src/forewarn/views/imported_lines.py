"""What is particular about an imported run, in words: how often its tool logged, and which rules lack readings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from forewarn.judge.coverage import Coverage
from forewarn.store import Run
from forewarn.types import in_words
from forewarn.views.wording import literal, short

_MOST_NOTES = 5
_NAMED = {
    "train/loss": "loss", "train/lr": "learning rate", "gradient/global_norm": "gradient norm",
    "eval/loss": "validation loss", "gradient/norm": "gradients of tensors",
}  # fmt: skip
"""The metrics whose cadence is told."""
_NOTE = "note"


def imported_part(run: Run) -> RenderableType:
    """Where the run comes from, how often its tool logged, and what was noted when it was read."""
    tool, often = run.info.imported_from, list(_cadences(run))
    told = f"read from {tool}: {', '.join(often)}" if often else f"read from {tool}"
    notes = notes_of(run)
    lines = [Text(f"· {literal(note)}", style="yellow") for note in notes[:_MOST_NOTES]]
    if len(notes) > _MOST_NOTES:
        lines.append(Text(f"· and {len(notes) - _MOST_NOTES} more notes", style="yellow"))
    return Group(Text(literal(told), style="dim"), *lines)


def coverage_part(covered: Coverage) -> RenderableType:
    """The rules that could not run, by what the log lacks, and what to log."""
    table = Table.grid(padding=(0, 2, 0, 0))
    for group in covered.missing:
        count = f"{len(group.rules)} rule{'s' * (len(group.rules) > 1)}"
        table.add_row(Text("  –", style="dim"), Text(group.what), Text(count), Text(group.to_do, style="dim"))
    few = ", ".join(f"{one.rule.name} ({one.readings} of {one.needed})" for one in covered.too_few)
    counted = f": {covered.num_missing} of {covered.num_rules} rules, whose readings the log does not have"
    parts: list[RenderableType] = [Text.assemble(("Not judged", "bold"), counted), table]
    if few:
        parts.append(Padding(Text(f"too few readings: {few}"), (0, 0, 0, 2)))
    return Group(*parts)


def imported_json(run: Run, covered: Coverage) -> dict[str, Any]:
    """The same as plain values."""
    return {
        "imported_from": run.info.imported_from,
        "notes": notes_of(run),
        "without_readings": [
            {"what": group.what, "to_do": group.to_do, "rules": [rule.code for rule in group.rules]}
            for group in covered.missing
        ],
        "too_few_readings": [
            {"rule": one.rule.code, "readings": one.readings, "needed": one.needed} for one in covered.too_few
        ],
    }


def notes_of(run: Run) -> list[str]:
    """What a person should know about the log."""
    return [str(event.data.get("text", "")) for event in run.events() if event.kind == _NOTE]


def _cadences(run: Run) -> Iterator[str]:
    """`loss every 10 steps` for each of the usual metrics that the run has."""
    unit = "epoch" if run.info.step_is_epoch else "step"
    names = set(run.names())
    for metric, words in _NAMED.items():
        if metric in names:
            steps = run.steps_of(metric)
            cadence = float(np.median(np.diff(steps))) if len(steps) > 1 else 0.0
            if cadence:
                yield f"{short(words)} every {unit if cadence == 1 else f'{in_words(cadence)} {unit}s'}"
            else:
                yield f"{short(words)} once"
