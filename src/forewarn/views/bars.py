"""Bars made of block characters."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

BARS, ASCII_BARS = "▁▂▃▄▅▆▇█", "_.:-=+*#"
_NO_READING = "·"
ORDERS = 50.0
"""Minimum ratio of the highest to the lowest value for a logarithmic scale."""


def cell(level: int, bars: str) -> str:
    """One character of a bar that reaches `level` above the bottom of this row."""
    return bars[min(level, len(bars) - 1)] if level >= 0 else " "


def line(values: Sequence[float], most: int, logarithmic: bool = False) -> str:
    """One character per value, scaled from the lowest to the highest; at most `most` values, evenly spaced."""
    if len(values) > most:
        values = [values[round(index * (len(values) - 1) / (most - 1))] for index in range(most)]
    heights = [_height(float(value), logarithmic) for value in values]
    finite = [height for height in heights if height is not None]
    if not finite:
        return _NO_READING * len(values)
    low, span = min(finite), max(finite) - min(finite)
    span = max(span, 1.0) if logarithmic else span or 1.0
    return "".join(
        _NO_READING if height is None else BARS[round((height - low) / span * (len(BARS) - 1))] for height in heights
    )


def bar_chart(values: NDArray[np.float64], width: int, rows: int = 1, bars: str = BARS) -> str:
    """A series in `width` columns, on a logarithmic scale if all values are positive; × marks a non-finite value."""
    if len(values) > width:
        with np.errstate(invalid="ignore"):  # a part may hold both inf and -inf
            values = np.array([part.mean() for part in np.array_split(values, width)])
    finite = np.isfinite(values)
    usable = np.where(finite, values, values[finite].min() if finite.any() else 1.0)
    scaled = np.log(usable) if (usable > 0).all() else usable
    span = np.ptp(scaled) if len(scaled) else 0.0
    levels = np.round((scaled - scaled.min(initial=np.inf)) / (span or 1.0) * (rows * len(bars) - 1)).astype(int)
    return "\n".join(
        "".join(
            cell(level - row * len(bars), bars) if good else " ×"[row == 0]
            for level, good in zip(levels, finite, strict=True)
        )
        for row in reversed(range(rows))
    )


@dataclass(frozen=True, slots=True)
class BarScale:
    """The values of the lowest and the highest bar."""

    low: float
    high: float
    is_logarithmic: bool

    @classmethod
    def of(cls, values: Iterable[float]) -> BarScale:
        """A scale for these values, logarithmic if they are positive and span orders of magnitude."""
        finite = [value for value in values if math.isfinite(value)] or [0.0]
        low, high = min(finite), max(finite)
        return cls(low, high, is_logarithmic=low > 0 and high / low >= ORDERS)

    def level(self, value: float, num_levels: int) -> int:
        """The index of a value's bar; the middle one if all values are equal."""
        low, high, value = (math.log(end) if self.is_logarithmic else end for end in (self.low, self.high, value))
        return num_levels // 2 if low == high else round((value - low) / (high - low) * (num_levels - 1))


def course(values: Sequence[float | None], width: int, scale: BarScale, bars: str = BARS) -> str:
    """A series over time in `width` columns: blank where there is no reading, × if it is not finite.

    If a column covers several values, it shows the one furthest from the first of the series, so no spike is lost.
    """
    start = next((value for value in values if value is not None and math.isfinite(value)), 0.0)
    edges = [column * len(values) // width for column in range(width + 1)]
    cells = []
    for begin, end in itertools.pairwise(edges):
        readings = [value for value in values[begin : max(end, begin + 1)] if value is not None]
        if not all(map(math.isfinite, readings)):
            cells.append("×")
        else:
            furthest = max(readings, key=lambda value: abs(value - start), default=None)
            cells.append(" " if furthest is None else bars[scale.level(furthest, len(bars))])
    return "".join(cells)


def _height(value: float, logarithmic: bool) -> float | None:
    if not math.isfinite(value) or (logarithmic and value <= 0):
        return None
    return math.log(value) if logarithmic else value
