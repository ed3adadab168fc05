"""Where the loss is heading: a law with an asymptote, fitted as the run goes, and how far it can be trusted."""

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

from forewarn.types import Block

Floats = NDArray[np.float64]

_FITTED_BINS = 48
"""Medians, at even distances on a logarithmic scale, that the law is fitted to."""
_LEAST_LOSSES = 200
"""Losses below which nothing is said."""
_FURTHEST = 4.0
"""Times the steps so far beyond which nothing is said: a tail cannot be told from so little of it."""
_LEARNT = 0.02
"""Share by which the loss must have fallen: a line without a bend has no future."""
_EXPONENTS = np.geomspace(0.05, 2.0, 32)
_FEWEST_FOLDS = 10.0
"""E-folds over the curve from which on an exponential fall is tried: fewer cannot be told from a power law."""
_MOST_FOLDS = 100.0
_HUBER = 1.5
"""Standard errors from which a bin counts for less."""
_CUTS = (0.4, 0.5, 0.6, 0.7, 0.8)
"""Shares of the curve from which its own present is predicted, to see how wrong such predictions are."""
_WIDTH = 2.0
"""Times the error of those predictions that makes an interval; tested to hold nine times in ten on real runs."""
_RECENT = 0.05
"""Share of the curve whose median is the present level."""
_NINE_IN_TEN = 1.64
"""Standard errors on either side that hold a normal value nine times in ten."""


class LossCurve:
    """The whole curve of a run in so many means at most, however long it gets: when it is full, each two become one."""

    def __init__(self, most_bins: int = 1024, *, finite_only: bool = True) -> None:
        self._most_bins = most_bins
        self._finite_only = finite_only
        """Whether losses that are not finite are left out: a law cannot be fitted to them, a picture should show them.
        """
        self._width = 1
        self._means: list[float] = []
        self._ends: list[int] = []
        self._waiting: list[float] = []

    def append(self, step: int, loss: float) -> None:
        """Take in one more loss."""
        if self._finite_only and not math.isfinite(loss):
            return
        self._waiting.append(loss)
        if len(self._waiting) == self._width:
            self._means.append(sum(self._waiting) / self._width)
            self._ends.append(step)
            self._waiting = []
        if len(self._means) == self._most_bins:
            self._means = [(one + two) / 2 for one, two in zip(self._means[::2], self._means[1::2], strict=True)]
            self._ends = self._ends[1::2]
            self._width *= 2

    def take(self, step: int, blocks: Iterable[Block]) -> None:
        """Take in the loss among the readings of a step."""
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
        """The newest step that is among the points; −1 before there is any."""
        return self._ends[-1] if self._ends else -1

    @property
    def points(self) -> tuple[Floats, Floats]:
        """Steps and losses, oldest first."""
        middle = np.array(self._ends, np.float64) - (self._width - 1) / 2
        return middle, np.array(self._means, np.float64)

    def state_dict(self) -> dict[str, Any]:
        return {"width": self._width, "means": self._means, "ends": self._ends, "waiting": self._waiting}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._width = int(state["width"])
        self._means, self._waiting = ([float(each) for each in state[name]] for name in ("means", "waiting"))
        self._ends = [int(each) for each in state["ends"]]


@dataclass(frozen=True, slots=True)
class Forecast:
    """What the loss is expected to be, each number with an interval that holds nine times in ten."""

    now: int
    """The step up to which the curve was seen."""
    level: float
    """The loss there."""
    too_early: str = ""
    """Why nothing can be told yet; the numbers below are NaN then."""
    at: int = 0
    """The step that is looked ahead to."""
    loss: float = math.nan
    low: float = math.nan
    high: float = math.nan
    target: float = math.nan
    reached: bool = False
    """The level is at or below the target already; the steps below are `now` then, however early it is."""
    target_step: float = math.nan
    """The step at which the target is met; infinite if that is beyond what can be told."""
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
class _Outlook:
    """A law, and how far it can be trusted."""

    law: _Law
    now: int
    rate: float
    """How wrong the law is per e-fold of steps ahead."""
    unsure: float
    """How wrong it is at the present step: the noise of the level and what the law misses it by."""
    lowest: float
    """What the loss cannot fall below."""

    def at(self, step: float) -> tuple[float, float, float]:
        """What the law says, and an interval that widens with the logarithm of the steps."""
        middle = float(self.law(step + 1))
        half = self.unsure + _WIDTH * self.rate * math.log((step + 1) / (self.now + 1))
        return middle, max(self.lowest, middle - half), middle + half


def forecast(curve: LossCurve, at: int | None = None, target: float | None = None) -> Forecast:
    """The loss at step `at` (by default twice as far as the run has come), and when `target` is met."""
    _check(at, target)
    steps, losses = curve.points
    if not len(steps):
        return Forecast(-1, math.nan, "no loss was recorded that is finite")
    now = curve.last_step
    if at is not None and at <= now:
        raise ValueError(f"step {at} is not ahead of the run, which has come to step {now}")
    ahead = 2 * now if at is None else operator.index(at)
    told = Forecast(now, _level(losses), _too_early(curve, steps, losses, ahead))
    outlook = None if told.too_early else _outlook(steps, losses, now)
    if outlook is not None:
        middle, low, high = outlook.at(ahead)
        told = dataclasses.replace(told, at=ahead, loss=middle, low=low, high=high)
    elif not told.too_early:
        told = dataclasses.replace(told, too_early="the loss does not follow a curve that could be continued")
    return told if target is None else _with_target(told, float(target), outlook)


def _check(at: Any, target: Any) -> None:
    if at is not None and (isinstance(at, bool) or not hasattr(at, "__index__")):
        raise TypeError(f"at must be the number of a step, a whole number, not {at!r}")
    if target is not None and (isinstance(target, bool) or not isinstance(target, Real)):
        raise TypeError(f"target must be a loss to wait for, a number, not {target!r}")
    if target is not None and math.isnan(target):
        raise ValueError("target must be a loss to wait for, not nan")


def _too_early(curve: LossCurve, steps: Floats, losses: Floats, ahead: float) -> str:
    if curve.num_losses < _LEAST_LOSSES:
        return f"{curve.num_losses} losses are too few; it takes {_LEAST_LOSSES}"
    if ahead > _FURTHEST * max(1.0, steps[-1]):
        return f"step {int(ahead)} is more than {_FURTHEST:g} times as far as the run has come"
    begun = float(np.median(losses[: max(3, len(losses) // 50)]))
    if _level(losses) > begun - _LEARNT * abs(begun):
        return "the loss has hardly fallen yet"
    return ""


def _recent(losses: Floats) -> Floats:
    return losses[-max(5, round(_RECENT * len(losses))) :]


def _level(losses: Floats) -> float:
    return float(np.median(_recent(losses)))


def _noise(losses: Floats) -> float:
    """The standard error of the level, from the median distance to it."""
    recent = _recent(losses)
    return 1.4826 * float(np.median(np.abs(recent - np.median(recent)))) / math.sqrt(len(recent))


def _binned(steps: Floats, losses: Floats) -> tuple[Floats, Floats, Floats]:
    """Middle, median and its standard error of bins at even distances on a logarithmic scale."""
    places = np.log(steps + 1)
    edges = np.linspace(places[0], places[-1], _FITTED_BINS + 1)[1:-1]
    number = np.searchsorted(edges, places)
    found = []
    for each in np.unique(number):
        inside = losses[number == each]
        middle = float(np.median(inside))
        spread = 1.4826 * float(np.median(np.abs(inside - middle)))
        found.append(
            (float(steps[number == each].mean()) + 1, middle, 1.2533 * spread / math.sqrt(len(inside)), len(inside))
        )
    x, y, error, count = np.array(found).T
    usual = np.median(error[count > 2] * np.sqrt(count[count > 2])) if (count > 2).any() else 0.0
    least = max(usual, 1e-3 * float(np.median(np.abs(y)))) / np.sqrt(count)
    return x, y, np.maximum(error, least)


def _fitted(steps: Floats, losses: Floats, fewest_folds: float = _FEWEST_FOLDS) -> _Law | None:
    """The law that is nearest to the curve, outliers counting for less; the first twentieth, a warm-up, is left out."""
    late = steps >= steps[0] + 0.05 * (steps[-1] - steps[0])
    x, y, error = _binned(steps[late], losses[late])
    if len(x) < 8:
        return None
    best: tuple[float, _Law] | None = None
    lowest = 0.0 if y.min() > 0 else -math.inf
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
    return None if best is None else best[1]


def _least_squares(basis: Floats, y: Floats, weights: Floats, lowest: float) -> tuple[float, float]:
    normal = (basis * weights) @ basis.T
    floor, drop = np.linalg.solve(normal + 1e-9 * np.trace(normal) * np.eye(2), (basis * weights) @ y)
    if floor >= lowest:
        return float(floor), float(drop)
    return lowest, float((weights * basis[1]) @ (y - lowest) / ((weights * basis[1]) @ basis[1]))


def _error_rate(steps: Floats, losses: Floats, whole: _Law) -> float | None:
    """How wrong predictions from a part of this very curve are about its present, per e-fold of steps ahead."""
    rates = []
    for cut in _CUTS:
        seen = round(cut * len(steps))
        fewest_folds = cut * _FEWEST_FOLDS if whole.decay else _FEWEST_FOLDS  # a part has fallen through fewer
        law = _fitted(steps[:seen], losses[:seen], fewest_folds)
        if law is not None:
            miss = _level(losses) - float(law(steps[-1] + 1))
            rates.append(miss / math.log((steps[-1] + 1) / (steps[seen - 1] + 1)))
    return float(np.sqrt(np.mean(np.square(rates)))) if len(rates) >= 3 else None


def _outlook(steps: Floats, losses: Floats, now: int) -> _Outlook | None:
    law = _fitted(steps, losses)
    rate = None if law is None else _error_rate(steps, losses, law)
    if law is None or rate is None:
        return None
    level = _level(losses)
    unsure = _NINE_IN_TEN * _noise(losses) + abs(level - float(law(steps[-1] + 1)))
    lowest = 0.0 if losses.min() > 0 else -math.inf
    return _Outlook(law, now, max(rate, 1e-3 * abs(level)), unsure, lowest)


def _with_target(told: Forecast, target: float, outlook: _Outlook | None) -> Forecast:
    """The first step at which the law, and each end of its interval, is at or below the target."""
    if told.level <= target:
        met = float(told.now)
        return dataclasses.replace(
            told, target=target, reached=True, target_step=met, target_soonest=met, target_latest=met
        )
    if outlook is None:
        return told
    ahead = np.geomspace(told.now + 1, _FURTHEST * (told.now + 1), 400)
    lines = np.array([outlook.at(float(step)) for step in ahead])

    def reached(line: Floats) -> float:
        where = np.flatnonzero(line <= target)
        return float(ahead[where[0]]) if len(where) else math.inf

    return dataclasses.replace(
        told, target=target, target_step=reached(lines[:, 0]), target_soonest=reached(lines[:, 1]),
        target_latest=reached(lines[:, 2]),
    )  # fmt: skip
