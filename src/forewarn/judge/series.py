"""Readings over time: `Series` for one scope, `Panel` for all scopes at once, `Baseline` for their usual level."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from forewarn.judge.spike import Spike
from forewarn.types import Values

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Steps = NDArray[np.int64]

MAD_TO_STD = 1.4826
"""The standard deviation of a normal distribution over its median absolute deviation."""

_MOST_EXPONENT = 709.0
"""Its exponential is about the largest number there is."""

_REFRESH_AFTER = 8
"""Accepted values after which a cached level is computed anew; a suspicious value refreshes it at once."""


_NO_STEPS, _NO_VALUES = np.empty(0, np.int64), np.empty(0, np.float32)


class Deviation(NamedTuple):
    """The newest value compared with the usual level before it."""

    value: float = math.nan
    center: float = math.nan
    """The median of the logarithms of the recent accepted values; NaN while there are too few."""
    reach: float = math.nan
    """How far above it, as a logarithm, a value may be."""
    lasting: int = 0
    """Outliers in a row up to now; 0 if the newest is none."""

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
        """The newest value over the usual level."""
        return self.value / self.level


class Panel:
    """All scopes of one metric over the last readings, oldest first; a missing reading is NaN."""

    __slots__ = ("_baseline", "at", "scopes", "steps", "values")

    def __init__(
        self,
        scopes: tuple[str, ...],
        steps: Steps,
        values: Values,
        baseline: Callable[[str, Spike], Baseline] | None = None,
    ) -> None:
        self.scopes = scopes
        self.steps = steps
        self.values = values
        """Shape [readings × scopes]."""
        self.at = int(steps[-1]) if len(steps) else -1
        """The step of the newest reading; -1 if there is none."""
        self._baseline = baseline
        """What keeps the usual level of a scope from one step to the next; without it all readings are gone over."""

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def cadence(self) -> float:
        """Steps from one reading to the next: the median, and 1 below two readings."""
        return max(1.0, float(np.median(np.diff(self.steps)))) if len(self) > 1 else 1.0

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

    def deviation(self, scope: str, spike: Spike) -> Deviation:
        """How the newest value of a scope stands to its usual level."""
        if self._baseline is not None:
            return self._baseline(scope, spike).latest
        baseline = Baseline(spike)
        for value in self.values[:, self.scopes.index(scope)].tolist():
            baseline.observe(value)
        return baseline.latest


class Series:
    """One scope of one metric over the last readings, oldest first."""

    __slots__ = ("_panel", "at", "scope", "steps", "values")

    def __init__(self, panel: Panel, scope: str = "") -> None:
        self._panel = panel
        self.scope = scope
        if scope in panel.scopes:
            self.steps = panel.steps
            self.values: Values = panel.values[:, panel.scopes.index(scope)]
            self.at = panel.at
            """The step of the newest reading; -1 if there is none."""
        else:
            self.steps, self.values, self.at = _NO_STEPS, _NO_VALUES, -1

    @classmethod
    def of(cls, values: Any, scope: str = "") -> Series:
        """A series of plain numbers at steps 0, 1, 2, …"""
        column = np.asarray(values, np.float32).reshape(-1, 1)
        return cls(Panel((scope,), np.arange(len(column)), column), scope)

    def __len__(self) -> int:
        return len(self.values)

    @property
    def cadence(self) -> float:
        """Steps from one reading to the next, usually: 1 for what is read on every step."""
        return self._panel.cadence if len(self) else 1.0

    def readings_in(self, steps: int) -> int:
        """How many readings so many steps hold, one at least."""
        return max(1, round(steps / self.cadence))

    def steps_of(self, readings: int) -> int:
        """How many steps so many readings stand for."""
        return round(readings * self.cadence)

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
        return median(self.values[max(0, end - window) : end])

    def ends(self, parts: int) -> tuple[float, float]:
        """The medians of the oldest and the newest of so many parts of the finite values; NaN if there are none."""
        finite = self.finite()
        size = max(1, len(finite) // parts)
        return median(finite[:size]), median(finite[-size:])

    def slope(self, window: int) -> float:
        """Least-squares change per step over the last `window` readings; NaN below three finite ones."""
        values, steps = self.values[-window:].astype(np.float64), self.steps[-window:]
        keep = np.isfinite(values)
        if keep.sum() < 3:
            return float("nan")
        x, y = steps[keep] - steps[keep].mean(), values[keep] - values[keep].mean()
        return float((x @ y) / (x @ x))

    def deviation(self, spike: Spike) -> Deviation:
        """The newest value compared with its usual level."""
        return self._panel.deviation(self.scope, spike) if self.scope in self._panel.scopes else Deviation()


def aligned(*series: Series) -> tuple[Steps, Floats]:
    """The steps at which all of these have a reading, and the readings there: [series × steps], oldest first."""
    steps = reduce(np.intersect1d, [curve.steps for curve in series])
    return steps, np.stack([curve.values[np.searchsorted(curve.steps, steps)] for curve in series]).astype(np.float64)


def median(values: NDArray[Any]) -> float:
    """The median of the finite values; NaN if there is none."""
    finite = values[np.isfinite(values)]
    finite.sort()
    return _middle(finite) if len(finite) else math.nan


def _middle(ordered: Sequence[Any]) -> float:
    """The median of values in rising order."""
    half = len(ordered) // 2
    return (float(ordered[-half - 1]) + float(ordered[half])) / 2


def trailing(flags: Bools) -> int:
    """How many at the end are True in a row."""
    return int(np.argmin(np.append(flags[::-1], False)))


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
    """The usual level of a series: median and MAD of recent log values, outliers kept out.

    A value that exceeds the median by `k · 1.4826 · MAD`, but by `floor` at least and `ceiling` at most, is an outlier.
    After `readmit_after` outliers in a row they become the level, so that a lasting shift is reported once and then
    accepted. Values that are not positive and finite have no logarithm and are ignored.

    Written without arrays: it runs on every step, and for one value plain numbers are several times as fast.
    """

    def __init__(self, spike: Spike) -> None:
        self.spike = spike
        self.seen = 0
        """Values observed so far."""
        self.latest = Deviation()
        """The verdict on the newest value."""
        self._accepted: deque[float] = deque(maxlen=spike.window)
        self._outside: list[float] = []
        """The outliers since the last accepted value."""
        self._age = 0
        """Values accepted since the level was computed."""
        self._center = self._reach = math.nan

    def observe(self, value: float) -> Deviation:
        """Judge one value, then let it join the level."""
        self.seen += 1
        if not 0 < value < math.inf:
            self.latest = Deviation(value, self._center, self._reach)
            return self.latest
        logarithm = math.log(value)
        if logarithm > self._center + self._reach and self._age:
            self._refresh()
        if logarithm > self._center + self._reach:
            self._outside.append(logarithm)
            self.latest = Deviation(value, self._center, self._reach, len(self._outside))
            if len(self._outside) >= self.spike.readmit_after:
                self._readmit()
        else:
            self.latest = Deviation(value, self._center, self._reach)
            self._accept(logarithm)
        return self.latest

    def _accept(self, logarithm: float) -> None:
        self._outside.clear()
        begins = len(self._accepted) + 1 == self.spike.minimum
        self._accepted.append(logarithm)
        self._age += 1
        if begins or (self._age >= _REFRESH_AFTER and len(self._accepted) >= self.spike.minimum):
            self._refresh()

    def _readmit(self) -> None:
        self._accepted.clear()
        self._accepted.extend(self._outside)
        self._outside.clear()
        self._center = self._reach = math.nan
        if len(self._accepted) >= self.spike.minimum:
            self._refresh()

    def _refresh(self) -> None:
        self._center = _middle(sorted(self._accepted))
        spread = MAD_TO_STD * _middle(sorted([abs(value - self._center) for value in self._accepted]))
        self._reach = min(max(self.spike.k * spread, self.spike.floor), self.spike.ceiling)
        self._age = 0

    def state_dict(self) -> dict[str, Any]:
        return {
            "seen": self.seen,
            "accepted": list(self._accepted),
            "outside": list(self._outside),
            "age": self._age,
            "center": self._center,
            "reach": self._reach,
        }

    @classmethod
    def from_state(cls, spike: Spike, state: dict[str, Any]) -> Baseline:
        baseline = cls(spike)
        baseline.seen, baseline._age = int(state["seen"]), int(state["age"])
        baseline._accepted.extend(float(value) for value in state["accepted"])
        baseline._outside.extend(float(value) for value in state["outside"])
        baseline._center, baseline._reach = float(state["center"]), float(state["reach"])
        return baseline
