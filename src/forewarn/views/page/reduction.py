"""Fewer points that look the same: the minimum and the maximum of every pixel column."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Steps = NDArray[np.int64]


def in_order(steps: Steps, values: NDArray[Any]) -> tuple[Steps, NDArray[Any]]:
    """Readings by step; of a step recorded twice, the last reading counts. Steps are along the last axis."""
    if not len(steps) or (np.diff(steps) > 0).all():
        return steps, values
    order = np.argsort(steps, kind="stable")
    ordered = steps[order]
    order = order[np.append(ordered[1:] != ordered[:-1], True)]
    return steps[order], values[..., order]


def columns_of(steps: Steps, columns: int) -> NDArray[np.int64]:
    """The number of the column that each step lies in, if columns of equal width cover all steps."""
    first, last = int(steps[0]), int(steps[-1])
    return (steps - first) * columns // (last - first + 1)


def kept_points(steps: Steps, values: NDArray[np.float32], columns: int) -> NDArray[np.int64]:
    """Indices of the points to draw, in order: a spike of one step never disappears.

    Each column keeps its minimum and maximum, and the first and last point of each kind that is not finite (NaN,
    infinity, minus infinity). The ends of the series are kept. `steps` must be ascending.
    """
    if len(values) <= 2 * columns:
        return np.arange(len(values))
    column = columns_of(steps, columns)
    begins = np.flatnonzero(np.append(True, column[1:] != column[:-1]))
    number = np.repeat(np.arange(len(begins)), np.diff(np.append(begins, len(column))))
    is_finite = np.isfinite(values)
    low, high = np.where(is_finite, values, np.inf), np.where(is_finite, values, -np.inf)
    kept = [np.array([0, len(values) - 1])]
    for candidates, extremes in ((low, np.minimum.reduceat(low, begins)), (high, np.maximum.reduceat(high, begins))):
        kept.append(_first_of_each(number, np.flatnonzero(is_finite & (candidates == extremes[number]))))
    for broken in (np.isnan(values), np.isposinf(values), np.isneginf(values)):
        places = np.flatnonzero(broken)
        kept += [_first_of_each(number, places), _first_of_each(number, places[::-1])]
    return np.unique(np.concatenate(kept))


def _first_of_each(number: NDArray[np.int64], places: NDArray[np.int64]) -> NDArray[np.int64]:
    """The first of these places in each column."""
    return places[np.unique(number[places], return_index=True)[1]]
