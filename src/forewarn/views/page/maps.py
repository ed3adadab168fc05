"""Many series in one picture: depth × time, one step over depth, and histograms over time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forewarn.histograms import LOWEST_EXPONENT, used_bins
from forewarn.store import Run
from forewarn.types import Values
from forewarn.views.page.packing import packed
from forewarn.views.page.reduction import Steps, columns_of

COLOURS = (2.0, 98.5)
"""Percentiles of all values at the ends of the color scale."""
USUAL = (5.0, 95.0)
"""Percentiles of earlier readings that bound what is usual."""
MOST_EARLIER = 100
"""Number of readings before a step that say what is usual."""
FEWEST_EARLIER = 5
_MOST_MEDIAN_VALUES = 1 << 22
"""Number of values from which the medians of the rows are taken."""


def heat_map(run: Run, metric: str, start: int | None, end: int | None, columns: int, rows: int | None = None) -> bytes:
    """The most unusual value of each scope in each column of steps; of evenly spaced scopes if there are many."""
    scopes = evenly(model_order(run, run.scopes(metric)), rows)
    steps = _between(run.steps_of(metric), start, end)
    begins = _columns(steps, columns)
    starts = steps[begins]
    cells = _Cells(len(scopes), len(starts))
    row_of = {scope: row for row, scope in enumerate(scopes)}
    thinning = max(1, len(scopes) * len(steps) // _MOST_MEDIAN_VALUES)
    for piece in run.pieces(metric, start, end):
        where = np.searchsorted(starts, piece.steps, side="right") - 1
        kept = [place for place, scope in enumerate(piece.scopes) if scope in row_of]
        if kept:
            numbers = np.array([row_of[piece.scopes[place]] for place in kept])
            cells.add(numbers, where, piece.values[kept], thinning)
    values = cells.values()
    low, high = _colour_range(values)
    ends = np.append(starts[1:] - 1, steps[-1:])
    header = {
        "metric": metric, "scopes": scopes, "starts": starts.tolist(), "ends": ends.tolist(), "low": low, "high": high,
    }  # fmt: skip
    return packed(header, {"cells": values})


class _Cells:
    """The lowest and the highest finite value of each cell, whether it has others, and the median of each row."""

    def __init__(self, num_rows: int, num_columns: int) -> None:
        shape = (num_rows, num_columns)
        self._low = np.full(shape, np.inf, np.float32)
        self._high = np.full(shape, -np.inf, np.float32)
        self._broken = np.full(shape, np.nan, np.float32)
        self._samples: list[tuple[NDArray[np.int64], Values]] = []

    def add(self, rows: NDArray[np.int64], columns: NDArray[np.int64], values: Values, thinning: int) -> None:
        """Readings [rows, steps] that lie in these columns."""
        order = np.argsort(columns, kind="stable")
        columns, values = columns[order], values[:, order]
        begins = np.flatnonzero(np.append(True, columns[1:] != columns[:-1]))
        cells = np.ix_(rows, columns[begins])
        is_finite = np.isfinite(values)
        lowest = np.minimum.reduceat(np.where(is_finite, values, np.inf), begins, axis=1)
        highest = np.maximum.reduceat(np.where(is_finite, values, -np.inf), begins, axis=1)
        self._low[cells] = np.minimum(self._low[cells], lowest)
        self._high[cells] = np.maximum(self._high[cells], highest)
        if np.isinf(values).any():
            sign = np.where(np.isinf(values), values, 0.0)
            worst = np.where(np.minimum.reduceat(sign, begins, axis=1) < 0, -np.inf, np.nan)
            worst = np.where(np.maximum.reduceat(sign, begins, axis=1) > 0, np.inf, worst)
            self._broken[cells] = np.where(np.isnan(worst), self._broken[cells], worst)
        self._samples.append((rows, values[:, ::thinning]))

    def values(self) -> Values:
        """The value of each cell that is furthest from the median of its row; infinite ones come first.

        Distances are logarithmic where a row has only positive values. A value that is not a number counts as missing,
        unless a cell has no other.
        """
        medians = self._medians()[:, None]
        low, high = self._low.astype(np.float64), self._high.astype(np.float64)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            above, below = np.log(high) - np.log(medians), np.log(medians) - np.log(low)
            is_positive = (np.min(low, axis=1, keepdims=True, initial=np.inf) > 0) & (medians > 0)
            is_higher = np.where(is_positive, above >= below, high - medians >= medians - low)
        extreme = np.where(is_higher, high, low)
        extreme = np.where(np.isfinite(extreme), extreme, np.nan)
        return np.where(np.isnan(self._broken), extreme, self._broken).astype(np.float32)

    def _medians(self) -> NDArray[np.float64]:
        medians = np.full(len(self._low), np.nan)
        by_rows: dict[bytes, list[Values]] = {}
        numbers: dict[bytes, NDArray[np.int64]] = {}
        for rows, values in self._samples:
            by_rows.setdefault(rows.tobytes(), []).append(values)
            numbers[rows.tobytes()] = rows
        for key, parts in by_rows.items():
            medians[numbers[key]] = _percentiles(np.concatenate(parts, axis=1), (50.0,))[0]
        return medians


def profile(run: Run, metric: str, step: int) -> bytes:
    """Each scope at the newest measured step up to `step`, with the usual range of its earlier readings."""
    scopes = model_order(run, run.scopes(metric))
    steps = run.steps_of(metric)
    steps = steps[steps <= step] if (steps <= step).any() else steps[:1]
    recent = steps[-(MOST_EARLIER + 1) :]
    table = np.full((len(scopes), len(recent)), np.nan, np.float32)
    rows = {scope: row for row, scope in enumerate(scopes)}
    if len(recent):
        for piece in run.pieces(metric, int(recent[0]), int(recent[-1])):
            cells = np.ix_(np.array([rows[scope] for scope in piece.scopes]), np.searchsorted(recent, piece.steps))
            table[cells] = piece.values
    earlier = table[:, :-1]
    low, high = _percentiles(earlier, USUAL)
    too_few = np.isfinite(earlier).sum(axis=1) < FEWEST_EARLIER
    low[too_few] = high[too_few] = np.nan
    values = table[:, -1] if len(recent) else np.full(len(scopes), np.nan, np.float32)
    header = {"metric": metric, "step": int(recent[-1]) if len(recent) else None, "scopes": scopes}
    return packed(header, {"values": values, "low": low, "high": high})


def histogram_map(run: Run, metric: str, scope: str, start: int | None, end: int | None, columns: int) -> bytes:
    """The share of the values of a tensor by the power of two of their magnitude, over time."""
    stored = run.histograms(metric, scope)
    order = np.argsort(stored.steps, kind="stable")
    steps = stored.steps[order]
    wanted = np.isin(steps, _between(steps, start, end))
    steps, order = steps[wanted], order[wanted]
    begins = _columns(steps, columns)
    counts, zeros = stored.counts[order], stored.zeros[order]
    if len(begins):
        counts, zeros = np.add.reduceat(counts, begins), np.add.reduceat(zeros, begins)
    bins = used_bins(counts)
    both = counts.sum(axis=1)
    total = np.maximum(1, both.sum(axis=1) + zeros)
    header = {
        "metric": metric, "scope": scope, "steps": steps[begins].tolist(),
        "exponents": list(range(LOWEST_EXPONENT + bins.start, LOWEST_EXPONENT + bins.stop)),
    }  # fmt: skip
    return packed(header, {"shares": (both / total[:, None])[:, bins], "zeros": zeros / total})


def model_order(run: Run, scopes: Sequence[str]) -> list[str]:
    """Parameters in the order of the model, then all others in the order in which they appeared."""
    places = {scope: place for place, scope in enumerate(run.info.parameters)}
    return sorted(scopes, key=lambda scope: places.get(scope, len(places)))


def evenly(items: Sequence[str], most: int | None) -> list[str]:
    """At most this many of the items, evenly spaced, with the first and the last."""
    if most is None or len(items) <= most:
        return list(items)
    return [items[round(index * (len(items) - 1) / max(1, most - 1))] for index in range(most)]


def _between(steps: Steps, start: int | None, end: int | None) -> Steps:
    kept = steps if start is None else steps[steps >= start]
    return kept if end is None else kept[kept <= end]


def _columns(steps: Steps, columns: int) -> NDArray[np.int64]:
    """Where each column begins: one per measured step if there is room, else columns of equal width, none empty."""
    if len(steps) <= columns:
        return np.arange(len(steps))
    column = columns_of(steps, columns)
    return np.flatnonzero(np.append(True, column[1:] != column[:-1]))


def _percentiles(values: NDArray[Any], percents: tuple[float, ...]) -> list[NDArray[np.float64]]:
    """Percentiles of the finite values of each row, NaN if it has none; `np.nanpercentile` takes far longer."""
    ordered = np.sort(np.where(np.isfinite(values), values, np.nan).astype(np.float64), axis=1)  # NaN goes last
    counts = np.isfinite(ordered).sum(axis=1)
    if not ordered.shape[1]:
        return [np.full(len(values), np.nan) for _ in percents]
    rows = np.arange(len(ordered))
    results = []
    for percent in percents:
        place = np.maximum(counts - 1, 0) * percent / 100
        below = np.floor(place).astype(np.int64)
        above = np.minimum(below + 1, np.maximum(counts - 1, 0))
        share = place - below
        results.append(ordered[rows, below] * (1 - share) + ordered[rows, above] * share)
    return results


def _colour_range(values: Values) -> tuple[float | None, float | None]:
    """The ends of the color scale; zeros are left out where nothing is negative, for a logarithmic scale."""
    finite = values[np.isfinite(values)].astype(np.float64)
    if len(finite) and finite.min() >= 0 and (finite > 0).any():
        finite = finite[finite > 0]
    if not len(finite):
        return None, None
    low, high = np.percentile(finite, COLOURS)
    return float(low), float(high)
