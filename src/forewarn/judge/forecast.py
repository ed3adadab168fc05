"""Loss forecasts: a law with an asymptote is fitted to the curve, with an error interval."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forewarn.rows import Row, Sheet
from forewarn.standing import TOO_EARLY, open_alerts
from forewarn.types import Alert, Block, Severity

Floats = NDArray[np.float64]

_FITTED_BINS = 48
"""Number of medians, evenly spaced on a logarithmic scale, to which the law is fitted."""
_LEAST_LOSSES = 200
"""Minimum number of losses for a forecast."""
_FURTHEST = 4.0
"""Furthest forecast, as a multiple of the steps so far; beyond it the data says too little."""
_LEARNT = 0.02
"""Fraction by which the loss must have fallen; a flat line cannot be extrapolated."""
_EXPONENTS = np.geomspace(0.05, 2.0, 32)
_FEWEST_FOLDS = 10.0
"""Minimum e-folds over the curve for an exponential fit; with fewer it looks like a power law."""
_MOST_FOLDS = 100.0
_HUBER = 1.5
"""Standard errors beyond which a bin is down-weighted."""
_CUTS = (0.4, 0.5, 0.6, 0.7, 0.8)
"""Fractions of the curve from which its end is predicted, to measure the prediction error."""
_WIDTH = 2.0
"""Half-width of the interval in prediction errors; tests on real runs show that it covers 90%."""
_RECENT = 0.05
"""Share of the curve whose median is the current level."""
_NINE_IN_TEN = 1.64
"""Half-width of the 90% interval of a normal distribution, in standard errors."""
_TREND_SHARE = 0.5
"""Fraction of the curve, from its end, whose slope limits the fall that the law may predict."""
_RISE_SHARE = 0.25
"""Fraction of the curve, from its end, that is searched for a rise."""
_CERTAIN = 3.0
"""Standard errors beyond which a slope is evidence of a rise."""

_LEAST_POINTS = 20
"""Minimum number of losses for a trend over the run."""
_NUM_LEVELS = 10
"""Number of equal parts of a run; the median of a part is its level."""
_FIRST_POINTS = 3
_CLEAR = 5.0
"""Standard deviations of the noise by which the first losses must lie above the last to count as a fall."""
_FALL_KEPT = 0.9
"""Fraction of its fall that the loss must keep; with less, it has risen again."""
_WITHIN_NOISE = 3.5
"""Standard errors of the difference of two levels up to which it is noise; the lowest of ten is too low by chance."""


class LossCurve:
    """The loss curve of a run in at most `most_bins` means; when it is full, neighbors are merged in pairs."""

    def __init__(self, most_bins: int = 1024, *, finite_only: bool = True) -> None:
        self._most_bins = most_bins
        self._finite_only = finite_only
        """Whether to leave out non-finite losses: a fit cannot use them, but a picture should show them."""
        self._width = 1
        self._means: list[float] = []
        self._ends: list[int] = []
        self._waiting: list[float] = []
        self.first = math.nan
        """The first loss."""

    def append(self, step: int, loss: float) -> None:
        """Add one loss."""
        if self._finite_only and not math.isfinite(loss):
            return
        if not self._waiting and not self._means:
            self.first = loss
        self._waiting.append(loss)
        if len(self._waiting) == self._width:
            self._means.append(sum(self._waiting) / self._width)
            self._ends.append(step)
            self._waiting = []
        if len(self._means) == self._most_bins:
            self._means = [(left + right) / 2 for left, right in zip(self._means[::2], self._means[1::2], strict=True)]
            self._ends = self._ends[1::2]
            self._width *= 2

    def take(self, step: int, blocks: Iterable[Block]) -> None:
        """Add the loss among the readings of a step."""
        if isinstance(blocks, Row):
            place = blocks.layout.whole.get("train/loss")
            if place is not None:
                self.append(step, blocks.numbers[place])
            return
        if isinstance(blocks, Sheet):
            place = blocks.layout.whole.get("train/loss")
            if place is not None:
                self.append(step, blocks.values.item(place))
            return
        for block in blocks:
            if block.name == "train/loss":
                self.append(step, float(block.values[0]))

    @classmethod
    def of(cls, steps: Iterable[int], losses: Iterable[float]) -> LossCurve:
        curve = cls()
        for step, loss in zip(steps, losses, strict=True):
            curve.append(int(step), float(loss))
        return curve

    @property
    def num_losses(self) -> int:
        return len(self._means) * self._width + len(self._waiting)

    @property
    def last_step(self) -> int:
        """The newest step among the points; −1 if there is none."""
        return self._ends[-1] if self._ends else -1

    @property
    def points(self) -> tuple[Floats, Floats]:
        """Steps and losses, oldest first."""
        middle = np.array(self._ends, np.float64) - (self._width - 1) / 2
        return middle, np.array(self._means, np.float64)

    @property
    def levels(self) -> Floats:
        """The median loss in each tenth of the run; empty if there are too few losses."""
        if len(self._means) < _LEAST_POINTS:
            return np.empty(0)
        return _levels(self.points[1])

    @property
    def is_falling(self) -> bool | None:
        """Whether the loss has fallen, and has kept most of its fall; None if there are too few losses to tell."""
        levels = self.levels
        if not len(levels):
            return None
        start = max(levels[0], self._begun(levels[-1]))
        fall, risen = start - levels[-1], levels[-1] - levels.min()
        noise = _WITHIN_NOISE * math.sqrt(math.pi / len(self.points[1]) * len(levels)) * self._noise(levels[-1])
        kept = risen <= (1 - _FALL_KEPT) * (fall + risen)
        return bool(fall > 0 and (kept or risen <= noise < fall))

    def _begun(self, level: float) -> float:
        """The first losses, if they are clearly above the noise of the last: the fall may be over in a few steps."""
        begun = float(np.median(self.points[1][:_FIRST_POINTS]))
        return begun if begun > level + _CLEAR * self._noise(level) else -np.inf

    def _noise(self, level: float) -> float:
        """The standard deviation of the last losses around their level."""
        losses = self.points[1]
        last = losses[-max(_LEAST_POINTS, len(_recent(losses))) :]  # a spread takes more points than a level
        return 1.4826 * float(np.median(np.abs(last - level)))

    def state_dict(self) -> dict[str, Any]:
        return {
            "width": self._width, "means": self._means, "ends": self._ends, "waiting": self._waiting,
            "first": self.first,
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._width = int(state["width"])
        self._means, self._waiting = ([float(value) for value in state[name]] for name in ("means", "waiting"))
        self._ends = [int(end) for end in state["ends"]]
        earliest = [*self._means[:1], math.nan]  # states of earlier versions have no first loss
        self.first = float(state.get("first", earliest[0]))


@dataclass(frozen=True, slots=True)
class Forecast:
    """The expected loss, with 90% intervals."""

    now: int
    """The last step of the curve."""
    level: float
    """The loss there."""
    declined: str = ""
    """Why there is no forecast; the numbers below are NaN then."""
    open_warnings: tuple[str, ...] = ()
    """The names of rules with an open warning, which the forecast does not take into account."""
    at: int = 0
    """The step of the forecast."""
    loss: float = math.nan
    low: float = math.nan
    high: float = math.nan
    target: float = math.nan
    reached: bool = False
    """Whether the level is already at or below the target; the steps below are then `now`."""
    target_step: float = math.nan
    """The step at which the target is met; infinite if it is beyond the forecast."""
    target_soonest: float = math.nan
    target_latest: float = math.nan


@dataclass(frozen=True, slots=True)
class _Law:
    """loss = floor + drop · (step / first)^(−exponent) · exp(−decay · (step − first)); one of the two is 0."""

    first: float
    exponent: float
    decay: float
    floor: float = 0.0
    drop: float = 1.0

    def __call__(self, step: float | Floats) -> Any:
        shape = np.power(step / self.first, -self.exponent) * np.exp(-self.decay * (step - self.first))
        return self.floor + self.drop * shape


@dataclass(frozen=True, slots=True)
class _Trend:
    """A fitted law, shifted to the current loss and limited to the recent slope."""

    law: _Law
    now: float
    level: float
    noise: float
    """Standard error of the level."""
    fastest: float
    """Steepest fall per e-fold of steps that the recent losses allow; 0 if they may not be falling at all."""

    def __call__(self, step: float) -> float:
        """The expected loss. It is never above the level, because a falling law is no evidence of a rise.

        The part above the asymptote shrinks as in the law.
        """
        present, floor = float(self.law(self.now + 1)), self.law.floor
        margin = _NINE_IN_TEN * self.noise
        start = min(max(present, self.level - margin), self.level + margin)
        kept = (float(self.law(step + 1)) - floor) / (present - floor) if present > floor else 1.0
        fall = min((1 - kept) * max(0.0, start - floor), self.fastest * math.log((step + 1) / (self.now + 1)))
        return min(self.level, start - fall)


@dataclass(frozen=True, slots=True)
class _Outlook:
    """A trend and its error."""

    trend: _Trend
    now: int
    rate: float
    """Error of the trend per e-fold of steps ahead."""
    unsure: float
    """Error at the current step: the noise of the level plus the misfit of the trend."""
    lowest: float
    highest: float
    """Limits of the loss, from its values so far."""

    def at(self, step: float) -> tuple[float, float, float]:
        """The expected loss, with an interval that widens with the logarithm of the steps."""
        middle = self.trend(step)
        half = self.unsure + _WIDTH * self.rate * math.log((step + 1) / (self.now + 1))
        return middle, max(self.lowest, middle - half), min(self.highest, middle + half)


def forecast(
    curve: LossCurve, at: int | None = None, target: float | None = None, alerts: Iterable[Alert] = ()
) -> Forecast:
    """The loss at step `at` (by default twice the steps so far), and when `target` is met.

    `alerts` are the alerts of the run. The forecast names open warnings, and declines if one is critical.
    """
    _check(at, target)
    warnings = [alert for alert in open_alerts(alerts) if alert.severity > Severity.INFO]
    steps, losses = curve.points
    if not len(steps):
        return Forecast(-1, math.nan, "no loss was recorded that is finite", _names(warnings))
    now = curve.last_step
    if at is not None and at <= now:
        raise ValueError(f"step {at} is not ahead of the run, which has come to step {now}")
    ahead = 2 * now if at is None else operator.index(at)
    critical = [alert for alert in warnings if alert.severity is Severity.CRITICAL]
    reason = f"{_names(critical)[0]} is open and critical" if critical else _reason_against(curve, steps, losses, ahead)
    result = Forecast(now, _level(losses), reason, _names(warnings))
    outlook = None if result.declined else _outlook(steps, losses, now)
    if outlook is not None:
        middle, low, high = outlook.at(ahead)
        result = dataclasses.replace(result, at=ahead, loss=middle, low=low, high=high)
    elif not result.declined:
        result = dataclasses.replace(result, declined="the loss does not follow a curve that can be extrapolated")
    return result if target is None else _with_target(result, float(target), outlook)


def _check(step: Any, target: Any) -> None:
    if step is not None and (isinstance(step, bool) or not hasattr(step, "__index__")):
        raise TypeError(f"at must be the number of a step, a whole number, not {step!r}")
    if target is not None and (isinstance(target, bool) or not isinstance(target, Real)):
        raise TypeError(f"target must be a loss to wait for, a number, not {target!r}")
    if target is not None and math.isnan(target):
        raise ValueError("target must be a loss to wait for, not nan")


def _reason_against(curve: LossCurve, steps: Floats, losses: Floats, ahead: float) -> str:
    if curve.num_losses < _LEAST_LOSSES:
        return f"{TOO_EARLY}, {curve.num_losses} losses are too few; it takes {_LEAST_LOSSES}"
    if ahead > _FURTHEST * max(1.0, steps[-1]):
        return f"step {int(ahead)} is more than {_FURTHEST:g} times as far as the run has come"
    begun = float(np.median(losses[: max(3, len(losses) // 50)]))
    if _level(losses) >= begun - _LEARNT * abs(begun):
        return f"{TOO_EARLY}, the loss has hardly fallen yet"
    recent = steps >= steps[-1] * (1 - _RISE_SHARE)
    slope, error = _slope(steps[recent], losses[recent])
    if slope > _CERTAIN * error and slope * math.log(1 / (1 - _RISE_SHARE)) > _LEARNT * abs(_level(losses)):
        return f"the loss has been rising over the last {_RISE_SHARE:.0%} of the run"
    return ""


def _names(alerts: Iterable[Alert]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(alert.name for alert in alerts))


def _slope(steps: Floats, losses: Floats) -> tuple[float, float]:
    """The slope of a robust line, in loss per e-fold of steps, and its standard error."""
    if len(steps) < _LEAST_POINTS:
        return 0.0, math.inf
    parts = np.array_split(np.arange(len(steps)), _LEAST_POINTS)
    x = np.array([np.log(steps[part] + 1).mean() for part in parts])
    y = np.array([np.median(losses[part]) for part in parts])
    later, before = np.tril_indices(len(x), -1)
    slope = float(np.median((y[later] - y[before]) / (x[later] - x[before])))
    misses = y - slope * x
    spread = 1.4826 * float(np.median(np.abs(misses - np.median(misses))))
    return slope, spread / (float(x.std()) * math.sqrt(len(x)))


def _levels(losses: Floats) -> Floats:
    """The median loss in each tenth of the run."""
    return np.array([np.median(part) for part in np.array_split(losses, _NUM_LEVELS)])


def _recent(losses: Floats) -> Floats:
    return losses[-max(5, round(_RECENT * len(losses))) :]


def _level(losses: Floats) -> float:
    return float(np.median(_recent(losses)))


def _noise(losses: Floats) -> float:
    """The standard error of the level, from the median distance to it."""
    recent = _recent(losses)
    return 1.4826 * float(np.median(np.abs(recent - np.median(recent)))) / math.sqrt(len(recent))


def _binned(steps: Floats, losses: Floats) -> tuple[Floats, Floats, Floats]:
    """Mean step, median loss and its standard error, for bins evenly spaced on a logarithmic scale."""
    places = np.log(steps + 1)
    edges = np.linspace(places[0], places[-1], _FITTED_BINS + 1)[1:-1]
    numbers = np.searchsorted(edges, places)
    bins = []
    for number in np.unique(numbers):
        inside = losses[numbers == number]
        middle = float(np.median(inside))
        spread = 1.4826 * float(np.median(np.abs(inside - middle)))
        bins.append(
            (float(steps[numbers == number].mean()) + 1, middle, 1.2533 * spread / math.sqrt(len(inside)), len(inside))
        )
    x, y, error, count = np.array(bins).T
    usual = np.median(error[count > 2] * np.sqrt(count[count > 2])) if (count > 2).any() else 0.0
    least = max(usual, 1e-3 * float(np.median(np.abs(y)))) / np.sqrt(count)
    return x, y, np.maximum(error, least)


def _fitted(steps: Floats, losses: Floats, fewest_folds: float = _FEWEST_FOLDS) -> _Law | None:
    """The law that fits best, with outliers down-weighted and the first twentieth, a warm-up, left out.

    Where none falls, the loss is at its floor and stays there.
    """
    late = steps >= steps[0] + 0.05 * (steps[-1] - steps[0])
    x, y, error = _binned(steps[late], losses[late])
    if len(x) < 8:
        return None
    best: tuple[float, _Law] | None = None
    lowest = 0.0 if y.min() >= 0 else -math.inf
    shapes = [_Law(float(x[0]), float(exponent), 0.0) for exponent in _EXPONENTS]
    shapes += [_Law(float(x[0]), 0.0, float(folds / x[-1])) for folds in np.geomspace(fewest_folds, _MOST_FOLDS, 16)]
    for shape in shapes:
        basis = np.stack([np.ones_like(x), shape(x)])
        weights = 1 / error**2
        floor = drop = 0.0
        for _ in range(4):
            floor, drop = _least_squares(basis, y, weights, lowest)
            misses = np.abs(y - floor - drop * basis[1]) / error
            weights = np.minimum(1.0, _HUBER / np.maximum(misses, 1e-12)) / error**2
        cost = float(np.where(misses < _HUBER, misses**2 / 2, _HUBER * (misses - _HUBER / 2)).sum())
        if drop > 0 and (best is None or cost < best[0]):
            best = (cost, dataclasses.replace(shape, floor=floor, drop=drop))
    return _Law(float(x[0]), 0.0, 0.0, floor=float(np.median(y)), drop=0.0) if best is None else best[1]


def _least_squares(basis: Floats, y: Floats, weights: Floats, lowest: float) -> tuple[float, float]:
    normal = (basis * weights) @ basis.T
    floor, drop = np.linalg.solve(normal + 1e-9 * np.trace(normal) * np.eye(2), (basis * weights) @ y)
    if floor >= lowest:
        return float(floor), float(drop)
    return lowest, float((weights * basis[1]) @ (y - lowest) / ((weights * basis[1]) @ basis[1]))


def _error_rate(steps: Floats, losses: Floats, full_law: _Law) -> float | None:
    """Error of predicting the end of this curve from parts of it, per e-fold of steps ahead."""
    rates = []
    for cut in _CUTS:
        num_seen = round(cut * len(steps))
        fewest_folds = cut * _FEWEST_FOLDS if full_law.decay else _FEWEST_FOLDS  # a part covers fewer
        law = _fitted(steps[:num_seen], losses[:num_seen], fewest_folds)
        if law is not None:
            trend = _trend(law, steps[:num_seen], losses[:num_seen])
            miss = _level(losses) - trend(steps[-1])
            if trend.level > _level(losses) > 0:  # the lower the loss, the less it can be off
                miss *= _level(losses) / trend.level
            rates.append(miss / math.log((steps[-1] + 1) / (steps[num_seen - 1] + 1)))
    return float(np.sqrt(np.mean(np.square(rates)))) if len(rates) >= 3 else None


def _trend(law: _Law, steps: Floats, losses: Floats) -> _Trend:
    recent = steps >= steps[-1] * (1 - _TREND_SHARE)
    slope, error = _slope(steps[recent], losses[recent])
    return _Trend(law, float(steps[-1]), _level(losses), _noise(losses), max(0.0, 2 * error - slope))


def _outlook(steps: Floats, losses: Floats, now: int) -> _Outlook | None:
    law = _fitted(steps, losses)
    rate = None if law is None else _error_rate(steps, losses, law)
    if law is None or rate is None:
        return None
    level = _level(losses)
    trend = _trend(law, steps, losses)
    unsure = _NINE_IN_TEN * _noise(losses) + abs(level - trend(steps[-1]))
    lowest = 0.0 if losses.min() >= 0 else -math.inf
    highest = max(level + unsure, float(_levels(losses).max()))
    return _Outlook(trend, now, max(rate, 1e-3 * abs(level)), unsure, lowest, highest)


def _with_target(result: Forecast, target: float, outlook: _Outlook | None) -> Forecast:
    """The first step at which the law, and each end of its interval, is at or below the target."""
    if result.level <= target:
        met = float(result.now)
        return dataclasses.replace(
            result, target=target, reached=True, target_step=met, target_soonest=met, target_latest=met
        )
    if outlook is None:
        return result
    ahead = np.geomspace(result.now + 1, _FURTHEST * (result.now + 1), 400)
    lines = np.array([outlook.at(float(step)) for step in ahead])

    def reached(line: Floats) -> float:
        indices = np.flatnonzero(line <= target)
        return float(ahead[indices[0]]) if len(indices) else math.inf

    return dataclasses.replace(
        result, target=target, target_step=reached(lines[:, 0]), target_soonest=reached(lines[:, 1]),
        target_latest=reached(lines[:, 2]),
    )  # fmt: skip
