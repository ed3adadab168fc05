"""Readings over time: `Series` for one scope, `Panel` for all scopes, `Baseline` for the usual level."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from functools import reduce
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from forewarn.judge.spike import Spike
from forewarn.types import Values

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Steps = NDArray[np.int64]

MAD_TO_STD = 1.4826
"""Ratio of the standard deviation to the median absolute deviation, for a normal distribution."""

_MOST_EXPONENT = 709.0
"""Largest exponent whose exponential still fits in a float."""

_REFRESH_AFTER = 8
"""Accepted values after which a cached level is recomputed; a suspicious value refreshes it at once."""


_NO_STEPS, _NO_VALUES = np.empty(0, np.int64), np.empty(0, np.float32)


class Deviation(NamedTuple):
    """The newest value compared with the usual level before it."""

    value: float = math.nan
    center: float = math.nan
    """The median of the logarithms of the recent accepted values; NaN while there are too few."""
    reach: float = math.nan
    """How far above the center a value may be, as a logarithm."""
    lasting: int = 0
    """Number of outliers in a row up to now; 0 if the newest value is not one."""

    @property
    def outlier(self) -> bool:
        return self.lasting > 0

    @property
    def level(self) -> float:
        """The median of the recent accepted values."""
        return math.exp(self.center)

    @property
    def bound(self) -> float:
        """The value above which a reading is an outlier."""
        return math.exp(min(self.center + self.reach, _MOST_EXPONENT))

    @property
    def ratio(self) -> float:
        """The newest value divided by the usual level."""
        return self.value / self.level


class Levels(Protocol):
    """Keeps the levels of a metric's scopes between readings; each reading is added once."""

    def baseline(self, scope: str, spike: Spike) -> Baseline: ...

    def rolling_median(self, scope: str, window: int) -> RollingMedian: ...


class Panel:
    """All scopes of one metric over the last readings, oldest first; a missing reading is NaN."""

    __slots__ = ("_series", "at", "last", "levels", "scopes", "steps", "values")

    def __init__(
        self,
        scopes: tuple[str, ...],
        steps: Steps,
        values: Values,
        levels: Levels | None = None,
    ) -> None:
        self.scopes = scopes
        self.steps = steps
        self.values = values
        """Shape [readings × scopes]."""
        self.at = int(steps[-1]) if len(steps) else -1
        """The step of the newest reading; -1 if there is none."""
        self.last: Values = values[-1] if len(steps) else np.full(len(scopes), np.nan, np.float32)
        """The newest reading of every scope; all NaN if there is none."""
        self.levels = levels
        """If None, a level is computed from all readings each time."""
        self._series: dict[str, Series] = {}

    def __len__(self) -> int:
        return len(self.steps)

    def series(self, scope: str = "") -> Series:
        """One scope; empty if the metric has no such scope. Rules that read the same scope share the object."""
        series = self._series.get(scope)
        if series is None:
            series = self._series[scope] = Series(self, scope)
        return series

    def median(self, window: int, skip: int = 0) -> Floats:
        """The median of the finite values per scope over the last `window` readings, without the newest `skip`."""
        end = len(self) - skip
        return nanmedian(self.values[max(0, end - window) : max(0, end)])

    def longest_gap(self, newest: int) -> int:
        """The longest time without a reading from the last of the earlier readings to the newest few."""
        return int(np.diff(self.steps[-newest - 1 :]).max(initial=0))

    def count(self) -> NDArray[np.int64]:
        """The number of finite readings of each scope."""
        count: NDArray[np.int64] = np.isfinite(self.values).sum(axis=0)
        return count


class Series:
    """One scope of one metric over the last readings, oldest first."""

    __slots__ = ("_levels", "at", "last", "scope", "steps", "values")

    def __init__(self, panel: Panel, scope: str = "") -> None:
        self.scope = scope
        self._levels = panel.levels
        if scope in panel.scopes:
            self.steps = panel.steps
            self.values: Values = panel.values[:, panel.scopes.index(scope)]
            self.at = panel.at
            """The step of the newest reading; -1 if there is none."""
        else:
            self._levels = None
            self.steps, self.values, self.at = _NO_STEPS, _NO_VALUES, -1
        self.last = float(self.values[-1]) if len(self.values) else math.nan
        """The newest reading; NaN if there is none."""

    @classmethod
    def of(cls, values: Any, scope: str = "") -> Series:
        """A series of plain numbers at steps 0, 1, 2, …"""
        column = np.asarray(values, np.float32).reshape(-1, 1)
        return Panel((scope,), np.arange(len(column)), column).series(scope)

    def __len__(self) -> int:
        return len(self.values)

    @property
    def cadence(self) -> float:
        """The median number of steps between readings; 1 if there are fewer than two."""
        return max(1.0, middle(np.diff(self.steps))) if len(self) > 1 else 1.0

    def readings_in(self, steps: int) -> int:
        """The number of readings in this many steps, at least one."""
        return max(1, round(steps / self.cadence))

    def steps_of(self, readings: int) -> int:
        """The number of steps from the first to the last of this many readings: what happens between is not known."""
        return round((readings - 1) * self.cadence) + 1

    def finite(self, window: int | None = None) -> Floats:
        """The finite values among the last `window` readings."""
        recent = self.values if window is None else self.values[-window:]
        return recent[np.isfinite(recent)].astype(np.float64)

    def median(self, window: int, skip: int = 0) -> float:
        """The median of the finite values of the last `window` readings, without the newest `skip`."""
        end = max(0, len(self) - skip)
        return median(self.values[max(0, end - window) : end])

    def ends(self, parts: int) -> tuple[float, float]:
        """The medians of the oldest and newest of `parts` equal parts of the finite values; NaN if there are none."""
        finite = self.finite()
        size = max(1, len(finite) // parts)
        return median(finite[:size]), median(finite[-size:])

    def slope(self, window: int) -> float:
        """Least-squares change per step over the last `window` readings; NaN with fewer than three finite ones."""
        values, steps = self.values[-window:].astype(np.float64), self.steps[-window:]
        keep = np.isfinite(values)
        if keep.sum() < 3:
            return float("nan")
        x, y = steps[keep] - steps[keep].mean(), values[keep] - values[keep].mean()
        return float((x @ y) / (x @ x))

    def deviation(self, spike: Spike) -> Deviation:
        """The newest value compared with its usual level."""
        if self._levels is not None:
            return self._levels.baseline(self.scope, spike).latest
        baseline = Baseline(spike)
        for value in self.values.tolist():
            baseline.observe(value)
        return baseline.latest

    def rolling_median(self, window: int) -> RollingMedian:
        """The rolling median over `window` readings, now and at earlier readings."""
        if self._levels is not None:
            return self._levels.rolling_median(self.scope, window)
        rolling = RollingMedian(window)
        for value in self.values.tolist():
            rolling.observe(value)
        return rolling


def aligned(*series: Series) -> tuple[Steps, Floats]:
    """The steps at which all series have a reading, and the readings there: [series × steps], oldest first."""
    steps = reduce(np.intersect1d, [curve.steps for curve in series])
    return steps, np.stack([curve.values[np.searchsorted(curve.steps, steps)] for curve in series]).astype(np.float64)


def median(values: NDArray[Any]) -> float:
    """The median of the finite values; NaN if there is none."""
    ordered = np.sort(values)
    if not len(ordered) or not (ordered[0] > -math.inf and ordered[-1] < math.inf):  # NaN is sorted to the end
        ordered = ordered[np.isfinite(ordered)]
    return _middle(ordered) if len(ordered) else math.nan


def middle(values: Floats) -> float:
    """What `np.median` gives, in a fraction of the time if the values are few."""
    ordered = np.sort(values)
    return math.nan if not len(ordered) or math.isnan(ordered[-1]) else _middle(ordered)


def _middle(ordered: Sequence[Any] | NDArray[Any]) -> float:
    """The median of sorted values."""
    half = len(ordered) // 2
    return (float(ordered[-half - 1]) + float(ordered[half])) / 2


def trailing(flags: Bools) -> int:
    """The number of True values in a row at the end."""
    return int(np.argmin(np.append(flags[::-1], False)))


def nanmedian(rows: NDArray[Any]) -> Floats:
    """The median of the finite values in each column; NaN where there are none."""
    clean = np.where(np.isfinite(rows), rows, np.inf).astype(np.float64)
    clean.sort(axis=0)
    count = np.isfinite(clean).sum(axis=0)
    columns = np.arange(clean.shape[1])
    if not len(clean):
        return np.full(len(columns), np.nan)
    lower = clean[np.maximum(count - 1, 0) // 2, columns]
    upper = clean[np.minimum(count // 2, len(clean) - 1), columns]
    return np.where(count > 0, (lower + upper) / 2, np.nan)


def usual_levels(steps: Steps, rows: NDArray[Any]) -> Floats:
    """The level of each column over time: the median in which a reading counts for the steps since the one before.

    The first steps of a run are read more often than later ones, and a plain median would be about them alone. NaN
    where a column has no finite value.
    """
    weights = np.empty(len(steps))
    weights[0] = 1.0
    np.subtract(steps[1:], steps[:-1], out=weights[1:])
    is_finite = np.isfinite(rows)
    clean = np.where(is_finite, rows, np.inf).astype(np.float64)
    order, columns = clean.argsort(axis=0, kind="stable"), np.arange(clean.shape[1])
    passed = np.where(is_finite, weights[:, None], 0.0)[order, columns].cumsum(axis=0)
    middle = (passed >= passed[-1] / 2).argmax(axis=0)
    return np.where(passed[-1] > 0, clean[order[middle, columns], columns], np.nan)


class Newest:
    """The two newest readings of a metric, and its extremes so far: what gates ask for on every step."""

    __slots__ = ("last", "lowest", "peak", "two")

    def __init__(self, panel: Panel) -> None:
        self.last: list[float] = []
        """By scope."""
        self.two: tuple[list[float], list[float]] = (self.last, self.last)
        """The reading before the last one, and the last; the first is shorter if scopes were added since."""
        self.peak = -math.inf
        """At least the largest value of any scope that is still in memory."""
        self.lowest = math.inf
        """At most the smallest."""
        self.extend(panel.values)

    def observe(self, values: list[float]) -> None:
        """Add one reading."""
        self.two = self.last, values
        self.last = values
        for value in values:
            if value > self.peak:
                self.peak = value
            if value < self.lowest:
                self.lowest = value

    def extend(self, rows: Values) -> None:
        """Add several readings."""
        for values in rows[-2:].tolist():
            self.two = self.last, values
            self.last = values
        self.peak = float(np.fmax.reduce(rows, axis=None, initial=self.peak))
        self.lowest = float(np.fmin.reduce(rows, axis=None, initial=self.lowest))


class RollingMedian:
    """The median of the finite values among the last `window` readings, now and up to two windows ago.

    A reading costs one microsecond; sorting the whole window each time would cost several.
    """

    def __init__(self, window: int) -> None:
        self.window = window
        self.seen = 0
        """Values observed so far."""
        self._recent: deque[float] = deque()
        self._ordered: list[float] = []
        """The finite values, sorted."""
        self._medians: deque[float] = deque(maxlen=2 * window + 1)

    def observe(self, value: float) -> None:
        """Add one value, and drop the oldest."""
        self.seen += 1
        recent, ordered = self._recent, self._ordered
        if len(recent) == self.window:
            oldest = recent.popleft()
            if -math.inf < oldest < math.inf:
                del ordered[bisect_left(ordered, oldest)]
        recent.append(value)
        if -math.inf < value < math.inf:
            insort(ordered, value)
        half = len(ordered) // 2
        self._medians.append((ordered[-half - 1] + ordered[half]) / 2 if ordered else math.nan)

    def copy(self) -> RollingMedian:
        """The same, to be continued separately."""
        copied = RollingMedian(self.window)
        copied.become(self)
        return copied

    def become(self, other: RollingMedian) -> None:
        """Take over the state of another one with the same window."""
        self.seen = other.seen
        self._recent, self._ordered = other._recent.copy(), other._ordered.copy()
        self._medians = other._medians.copy()

    def is_rising(self) -> bool:
        """Whether the median may have risen over two windows in a row: True where nothing of a window was finite."""
        medians, window = self._medians, self.window
        if len(medians) <= 2 * window:
            return False
        before = medians[-1 - window]
        return not (medians[-1] <= before or before <= medians[0])

    def at(self, windows_ago: int) -> float:
        """The median 0, 1 or 2 windows ago; NaN if nothing of that window was finite."""
        return self._medians[-1 - windows_ago * self.window]


class Baseline:
    """The usual level of a series: median and MAD of recent log values, without outliers.

    A value is an outlier if it exceeds the median by `k · 1.4826 · MAD`, limited to between `floor` and `ceiling`.
    After `readmit_after` outliers in a row, they become the level, so a lasting shift is reported once and then
    accepted. Values that are not positive and finite have no logarithm and are ignored.

    It uses no arrays, because it runs on every step, and plain numbers are several times faster for one value.
    """

    def __init__(self, spike: Spike) -> None:
        self.spike = spike
        self.seen = 0
        """Values observed so far."""
        self.lasting = 0
        """Number of outliers in a row up to now; 0 if the newest value is not one."""
        self._newest = self._center_then = self._reach_then = math.nan
        """The newest value, and the level that it was compared with."""
        self._accepted: deque[float] = deque()
        """The last `spike.window` accepted logarithms."""
        self._ordered: list[float] = []
        """The same, sorted."""
        self._outside: list[float] = []
        """The outliers since the last accepted value."""
        self._age = 0
        """Values accepted since the level was computed."""
        self._negative_at = -math.inf
        """The number of values observed up to the last negative one."""
        self._center = self._reach = math.nan

    @property
    def latest(self) -> Deviation:
        """The verdict on the newest value."""
        return Deviation(self._newest, self._center_then, self._reach_then, self.lasting)

    def observe(self, value: float) -> None:
        """Judge one value, then add it to the level."""
        self.seen += 1
        self._newest, self._center_then, self._reach_then = value, self._center, self._reach
        self.lasting = 0
        if not 0 < value < math.inf:
            if value < 0:
                self._negative_at = self.seen
            return
        logarithm = math.log(value)
        if logarithm > self._center + self._reach:
            if self._age:
                self._refresh()
                self._center_then, self._reach_then = self._center, self._reach
            if logarithm > self._center + self._reach:
                self._outside.append(logarithm)
                self.lasting = len(self._outside)
                if self.lasting >= self.spike.readmit_after:
                    self._readmit()
                return
        self._outside.clear()
        accepted, ordered = self._accepted, self._ordered
        num_accepted = len(accepted) + 1
        if num_accepted > self.spike.window:
            del ordered[bisect_left(ordered, accepted.popleft())]
        accepted.append(logarithm)
        insort(ordered, logarithm)
        self._age += 1
        minimum = self.spike.minimum
        if num_accepted == minimum or (self._age >= _REFRESH_AFTER and num_accepted > minimum):
            self._refresh()

    def outliers(self, values: Sequence[float]) -> list[bool]:
        """Observe these values; for each of them, whether it is an outlier."""
        outliers = []
        for value in values:
            self.observe(value)
            outliers.append(self.lasting > 0)
        return outliers

    def copy(self) -> Baseline:
        """The same, to be continued separately."""
        copied = Baseline(self.spike)
        copied.become(self)
        return copied

    def become(self, other: Baseline) -> None:
        """Take over the state of another one with the same settings."""
        self.seen, self.lasting, self._age = other.seen, other.lasting, other._age
        self._newest, self._center_then, self._reach_then = other._newest, other._center_then, other._reach_then
        self._accepted, self._ordered = other._accepted.copy(), other._ordered.copy()
        self._outside = other._outside.copy()
        self._negative_at, self._center, self._reach = other._negative_at, other._center, other._reach

    def saw_negative(self, window: int) -> bool:
        """Whether any of the last `window` values was negative."""
        return self.seen - self._negative_at < window

    def _readmit(self) -> None:
        self._take(self._outside)
        self._outside.clear()
        self._center = self._reach = math.nan
        if len(self._accepted) >= self.spike.minimum:
            self._refresh()

    def _take(self, accepted: Sequence[float]) -> None:
        self._accepted = deque(accepted[-self.spike.window :])
        self._ordered = sorted(self._accepted)

    def _refresh(self) -> None:
        center = self._center = _middle(self._ordered)
        # Sorting what falls and then rises takes a fraction of the time.
        spread = MAD_TO_STD * _middle(sorted([abs(value - center) for value in self._ordered]))
        self._reach = min(max(self.spike.k * spread, self.spike.floor), self.spike.ceiling)
        self._age = 0

    def state_dict(self) -> dict[str, Any]:
        return {
            "seen": self.seen,
            "accepted": list(self._accepted),
            "outside": list(self._outside),
            "age": self._age,
            "negative_at": self._negative_at,
            "center": self._center,
            "reach": self._reach,
        }

    @classmethod
    def from_state(cls, spike: Spike, state: dict[str, Any]) -> Baseline:
        baseline = cls(spike)
        baseline.seen, baseline._age = int(state["seen"]), int(state["age"])
        baseline._take([float(value) for value in state["accepted"]])
        baseline._outside.extend(float(value) for value in state["outside"])
        baseline._negative_at = float(state.get("negative_at", baseline.seen))  # earlier versions did not keep it
        baseline._center, baseline._reach = float(state["center"]), float(state["reach"])
        return baseline
