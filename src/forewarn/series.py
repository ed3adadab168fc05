"""Readings over time: `Series` for one scope, `Panel` for all scopes at once, `Baseline` for their usual level."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forewarn.thresholds.spike import Spike
from forewarn.types import Values

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Steps = NDArray[np.int64]

MAD_TO_STD = 1.4826
"""The standard deviation of a normal distribution over its median absolute deviation."""

_REFRESH_AFTER = 8
"""Accepted values after which a cached level is computed anew; a suspicious value refreshes it at once."""


@dataclass(frozen=True, slots=True)
class Deviation:
    """How the newest value of each scope stands to the usual level of that scope, before it joined that level."""

    value: Floats
    level: Floats
    """The median of the recent accepted values; NaN while there are too few."""
    bound: Floats
    """The value above which a reading is an outlier."""
    outlier: Bools
    lasting: NDArray[np.int64]
    """Outliers in a row up to now; 0 if the newest is none."""

    @property
    def ratio(self) -> Floats:
        """The newest value over the usual level."""
        return self.value / self.level


class Panel:
    """All scopes of one metric over the last readings, oldest first; a missing reading is NaN."""

    __slots__ = ("_deviation", "scopes", "steps", "values")

    def __init__(
        self,
        scopes: tuple[str, ...],
        steps: Steps,
        values: Values,
        deviation: Callable[[Spike], Deviation] | None = None,
    ) -> None:
        self.scopes = scopes
        self.steps = steps
        self.values = values
        """Shape [readings × scopes]."""
        self._deviation = deviation

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def at(self) -> int:
        """The step of the newest reading; -1 if there is none."""
        return int(self.steps[-1]) if len(self) else -1

    @property
    def last(self) -> Values:
        """The newest reading of every scope; all NaN if there is none."""
        return self.values[-1] if len(self) else np.full(len(self.scopes), np.nan, np.float32)

    def median(self, window: int, skip: int = 0) -> Floats:
        """The median of the finite values of the last `window` readings per scope, the newest `skip` left out."""
        end = len(self) - skip
        return nanmedian(self.values[max(0, end - window) : max(0, end)])

    def count(self) -> NDArray[np.int64]:
        """How many finite readings each scope has."""
        count: NDArray[np.int64] = np.isfinite(self.values).sum(axis=0)
        return count

    def deviation(self, spike: Spike) -> Deviation:
        """How the newest values stand to their usual level."""
        if self._deviation is None:
            baseline = Baseline(len(self.scopes), spike)
            for row in self.values:
                baseline.observe(row)
            return baseline.latest
        return self._deviation(spike)


class Series:
    """One scope of one metric over the last readings, oldest first."""

    __slots__ = ("_panel", "scope", "steps", "values")

    def __init__(self, panel: Panel, scope: str = "") -> None:
        self._panel = panel
        self.scope = scope
        self.steps = panel.steps
        if scope in panel.scopes:
            self.values: Values = panel.values[:, panel.scopes.index(scope)]
        else:
            self.values = np.empty(0, np.float32)
            self.steps = self.steps[:0]

    @classmethod
    def of(cls, values: Any, scope: str = "") -> Series:
        """A series of plain numbers at steps 0, 1, 2, …"""
        column = np.asarray(values, np.float32).reshape(-1, 1)
        return cls(Panel((scope,), np.arange(len(column)), column), scope)

    def __len__(self) -> int:
        return len(self.values)

    @property
    def at(self) -> int:
        """The step of the newest reading; -1 if there is none."""
        return int(self.steps[-1]) if len(self) else -1

    @property
    def last(self) -> float:
        """The newest reading; NaN if there is none."""
        return float(self.values[-1]) if len(self) else float("nan")

    def finite(self, window: int | None = None) -> Floats:
        """The finite values among the last `window` readings."""
        recent = self.values if window is None else self.values[-window:]
        return recent[np.isfinite(recent)].astype(np.float64)

    def median(self, window: int, skip: int = 0) -> float:
        """The median of the finite values of the last `window` readings, the newest `skip` left out."""
        end = max(0, len(self) - skip)
        return float(nanmedian(self.values[max(0, end - window) : end, None])[0])

    def slope(self, window: int) -> float:
        """Least-squares change per step over the last `window` readings; NaN below three finite ones."""
        values, steps = self.values[-window:].astype(np.float64), self.steps[-window:]
        keep = np.isfinite(values)
        if keep.sum() < 3:
            return float("nan")
        x, y = steps[keep] - steps[keep].mean(), values[keep] - values[keep].mean()
        return float((x @ y) / (x @ x))

    def deviation(self, spike: Spike) -> Deviation:
        """How the newest value stands to its usual level, as arrays of one element."""
        if self.scope not in self._panel.scopes:
            return Baseline(1, spike).latest
        everyone = self._panel.deviation(spike)
        at = slice(i := self._panel.scopes.index(self.scope), i + 1)
        return Deviation(
            everyone.value[at], everyone.level[at], everyone.bound[at], everyone.outlier[at], everyone.lasting[at]
        )


def nanmedian(rows: NDArray[Any]) -> Floats:
    """The median down each column with non-finite values left out; NaN where nothing is left."""
    clean = np.where(np.isfinite(rows), rows, np.inf).astype(np.float64)
    clean.sort(axis=0)
    count = np.isfinite(clean).sum(axis=0)
    columns = np.arange(clean.shape[1])
    if not len(clean):
        return np.full(len(columns), np.nan)
    lower = clean[np.maximum(count - 1, 0) // 2, columns]
    upper = clean[np.minimum(count // 2, len(clean) - 1), columns]
    return np.where(count > 0, (lower + upper) / 2, np.nan)


class Baseline:
    """The usual level of many scopes: median and MAD of recent log values, outliers kept out.

    A value that exceeds the median by `k · 1.4826 · MAD`, but by `floor` at least and `ceiling` at most, is an outlier.
    After `readmit_after` outliers in a row they become the level, so that a lasting shift is reported once and then
    accepted. Values that are not positive and finite have no logarithm: they neither count nor disturb.
    """

    def __init__(self, num_scopes: int, spike: Spike) -> None:
        self.spike = spike
        self.seen = 0
        """Rows observed so far."""
        self._accepted = np.full((num_scopes, spike.window), np.nan)
        self._outside = np.full((num_scopes, spike.readmit_after), np.nan)
        self._count = np.zeros(num_scopes, np.int64)
        self._lasting = np.zeros(num_scopes, np.int64)
        self._age = np.zeros(num_scopes, np.int64)
        self._center = np.full(num_scopes, np.nan)
        self._reach = np.full(num_scopes, np.nan)
        self.latest = self._quiet()
        """The verdict on the newest row."""

    def grow(self, num_scopes: int) -> None:
        """Make room for scopes that appeared later; they start without a level."""
        if num_scopes == len(self._count):
            return
        fresh = Baseline(num_scopes - len(self._count), self.spike)
        for name in _STATE:
            setattr(self, name, np.concatenate([getattr(self, name), getattr(fresh, name)]))
        self.latest = self._quiet()

    def observe(self, row: NDArray[Any]) -> Deviation:
        """Judge one reading of every scope, then let it join the level."""
        self.seen += 1
        value = row.astype(np.float64)
        usable = np.isfinite(value) & (value > 0)
        logs = np.log(np.where(usable, value, 1.0))
        suspicious = usable & (logs > self._center + self._reach)
        if (stale := np.flatnonzero(suspicious & (self._age > 0))).size:
            self._refresh(stale)
            suspicious[stale] = logs[stale] > self._center[stale] + self._reach[stale]
        with np.errstate(over="ignore"):
            level, bound = np.exp(self._center), np.exp(self._center + self._reach)

        self._lasting[usable & ~suspicious] = 0
        for one in np.flatnonzero(suspicious):
            self._outside[one, self._lasting[one]] = logs[one]
            self._lasting[one] += 1
        self.latest = Deviation(value, level, bound, suspicious, np.where(suspicious, self._lasting, 0))
        self._readmit(np.flatnonzero(self._lasting >= self.spike.readmit_after))
        self._accept(np.flatnonzero(usable & ~suspicious), logs)
        return self.latest

    def _quiet(self) -> Deviation:
        unknown = np.full(len(self._count), np.nan)
        return Deviation(unknown, unknown, unknown, np.zeros(len(unknown), np.bool_), np.zeros(len(unknown), np.int64))

    def _accept(self, which: NDArray[np.intp], logs: Floats) -> None:
        self._accepted[which, self._count[which] % self.spike.window] = logs[which]
        self._count[which] += 1
        self._age[which] += 1
        count = self._count[which]
        due = (self._age[which] >= _REFRESH_AFTER) & (count >= self.spike.minimum) | (count == self.spike.minimum)
        self._refresh(which[due])

    def _readmit(self, which: NDArray[np.intp]) -> None:
        for one in which:
            recent = self._outside[one]
            self._accepted[one] = np.nan
            kept = recent[-self.spike.window :]
            self._accepted[one, : len(kept)] = kept
            self._count[one] = len(kept)
            self._lasting[one] = 0
            self._center[one] = self._reach[one] = np.nan
        self._refresh(which[self._count[which] >= self.spike.minimum])

    def _refresh(self, which: NDArray[np.intp]) -> None:
        if not which.size:
            return
        rows = self._accepted[which].T
        center = nanmedian(rows)
        spread = MAD_TO_STD * nanmedian(np.abs(rows - center))
        self._center[which] = center
        self._reach[which] = np.clip(self.spike.k * spread, self.spike.floor, self.spike.ceiling)
        self._age[which] = 0

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, **{name: getattr(self, name).copy() for name in _STATE}}

    @classmethod
    def from_state(cls, spike: Spike, state: dict[str, Any]) -> Baseline:
        made = cls(len(state["_count"]), spike)
        made.seen = int(state["seen"])
        for name in _STATE:
            setattr(made, name, np.array(state[name]))
        return made


_STATE = ("_accepted", "_outside", "_count", "_lasting", "_age", "_center", "_reach")
