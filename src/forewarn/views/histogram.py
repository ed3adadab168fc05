"""A histogram in the terminal: one column per power of two, negative values left of zero."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from forewarn.histograms import LOWEST_EXPONENT, in_line, used_bins
from forewarn.types import Counts, Shape, in_words
from forewarn.views.bars import BARS, cell

ROWS = 6


def picture(counts: Counts, zeros: int, width: int = 80, bars: str = BARS) -> list[str]:
    """The histogram [2 × bins] as bars above an axis; if it is too wide, a column covers several powers of two."""
    used = used_bins(counts[None])
    per_column = max(1, math.ceil(2 * (used.stop - used.start) / max(1, width - 1)))
    first = used.start - (used.start - used.stop) % -per_column  # padding goes below the smallest values
    columns = _columns(counts, slice(first, used.stop), zeros, per_column)
    heights = np.ceil(columns / max(1, columns.max()) * ROWS * len(bars)).astype(int) - 1  # a single value still shows
    lines = [
        "".join(cell(height - row * len(bars), bars) for height in heights.tolist()).rstrip()
        for row in reversed(range(ROWS))
    ]
    named = f"{per_column} powers of two" if per_column > 1 else "one power of two"
    counted = f"{int(columns.sum()):,} values, {zeros:,} of them zero; each column covers {named}"
    return [*lines, _axis(len(columns) // 2, first, used.stop), counted]


def words(shape: float, percentiles: Mapping[str, float]) -> list[str]:
    """The shape in words and the percentiles on one line, as far as they were recorded."""
    numbers = [f"{name} {in_words(value)}" for name, value in percentiles.items() if not math.isnan(value)]
    lines = [str(Shape(int(shape)))] if shape in set(map(float, Shape)) else []
    return lines + (["  ".join(numbers)] if numbers else [])


def _columns(counts: Counts, bins: slice, zeros: int, per_column: int) -> Counts:
    """Counts in the order of the values, with several bins per column."""
    begin = max(0, -bins.start)  # a column may begin below the first bin
    part = np.zeros((2, bins.stop - bins.start), np.int64)
    part[:, begin:] = counts[:, bins.start + begin : bins.stop]
    grouped = part.reshape(1, 2, -1, per_column).sum(axis=3)
    line: Counts = in_line(grouped, np.array([zeros]))[0]
    return line


def _axis(side: int, first: int, stop: int) -> str:
    """An axis with zero in the middle and the largest and, if there is room, smallest magnitudes on both sides."""
    if side == 0:
        return "0"
    largest, smallest = (in_words(2.0 ** (edge + LOWEST_EXPONENT)) for edge in (stop, first))
    left, right = f"-{largest}", largest
    if len(left) + len(smallest) + 4 <= side:
        left += f"-{smallest} ".rjust(side - len(left))
        right = f" {smallest}" + right.rjust(side - len(smallest) - 1)
    elif len(left) >= side:
        return f"{left} 0 {right}"
    return f"{left.ljust(side)}0{right.rjust(side)}"
