"""The checklist as text, with the curve of learning rates as a small picture."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from forewarn.preflight_checks.result import Preflight, RateCurve, State
from forewarn.types import figure
from forewarn.views.bars import BARS, BarScale, cell
from forewarn.views.console import plain_console
from forewarn.views.wording import literal, short

WIDTH = 80
MARKS = {
    State.PASS: ("✓", "green"), State.LOOK: ("⚠", "yellow"), State.FAIL: ("✗", "red"), State.UNKNOWN: ("–", "dim"),
    State.INFO: ("·", "cyan"),
}  # fmt: skip
_VERDICT_STYLES = ("bold green", "bold yellow", "bold red")
_CURVE_WIDTH, _CURVE_ROWS = 56, 4


def as_text(result: Preflight) -> RenderableType:
    """The verdict, the checks, what to do and the curve."""
    verdict = Text.assemble(
        (short(result.model), "bold"), ": ", (result.verdict, _VERDICT_STYLES[result.exit_code]), "\n"
    )
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(ratio=1)
    for check in result.checks:
        sign, style = MARKS[check.state]
        detail = Text(literal(check.detail), style="" if check.state in (State.LOOK, State.FAIL) else "dim")
        table.add_row(Text(sign, style=style), Text(check.name), detail)
    return Group(verdict, table, *_advice(result), *_curve(result.curve))


def as_plain_text(result: Preflight) -> str:
    """The same without colors, 80 columns wide."""
    console = plain_console(io.StringIO())
    console.width = WIDTH
    with console.capture() as captured:
        console.print(as_text(result))
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def _advice(result: Preflight) -> Iterator[RenderableType]:
    advised = [check for check in result.checks if check.advice and check.state in (State.LOOK, State.FAIL)]
    if not advised:
        return
    yield Text("\nWhat to do", style="bold")
    table = Table.grid(padding=(0, 1, 0, 0))
    for rank, check in enumerate(sorted(advised, key=lambda check: check.state is not State.FAIL), 1):
        table.add_row(f"  {rank}.", Text(f"{literal(check.advice)}."))
    yield table


def _curve(curve: RateCurve | None) -> Iterator[RenderableType]:
    """The loss over the learning rate; marks below it show the suggested and the present rate."""
    if curve is None or len(curve.losses) < 2:
        return
    yield Text("\nLoss over the learning rate", style="bold")
    yield Padding(Text("\n".join(_rows(curve))), (0, 0, 0, 2))


def _rows(curve: RateCurve) -> Iterator[str]:
    first = curve.losses[0]
    shown = [min(loss, first + abs(first)) for loss in curve.losses]  # a loss that explodes would flatten the rest
    scale = BarScale.of(shown)
    columns = [shown[round(place * (len(shown) - 1) / (_CURVE_WIDTH - 1))] for place in range(_CURVE_WIDTH)]
    levels = [scale.level(loss, _CURVE_ROWS * len(BARS)) for loss in columns]
    labels = {_CURVE_ROWS - 1: figure(scale.high), 0: figure(scale.low)}
    margin = max(map(len, labels.values()))
    for row in reversed(range(_CURVE_ROWS)):
        bars = "".join(cell(level - row * len(BARS), BARS) for level in levels)
        yield f"{labels.get(row, '').rjust(margin)} {bars}".rstrip()
    marks = [(curve.present, "yours"), (curve.suggested, "suggested")]
    for rate, words in marks:
        if curve.rates[0] <= rate <= curve.rates[-1]:
            place = round(_share(curve, rate) * (_CURVE_WIDTH - 1))
            text = f"▲ {words} {figure(rate)}"
            line = f"{text[2:]} ▲".rjust(place + 1) if place + len(text) > _CURVE_WIDTH else " " * place + text
            yield " " * (margin + 1) + line
    low, high = figure(curve.rates[0]), figure(curve.rates[-1])
    yield " " * (margin + 1) + low + high.rjust(_CURVE_WIDTH - len(low))


def _share(curve: RateCurve, rate: float) -> float:
    return math.log(rate / curve.rates[0]) / math.log(curve.rates[-1] / curve.rates[0])
