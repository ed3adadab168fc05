"""The healthy range of the update ratio, which falls over a run. It is only shown, and never raises an alert."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import ArrayLike

EARLY_SHARE = 0.1
"""Fraction of the declared steps during which weights still find their scale."""
LATE_SHARE = 0.2
"""Fraction of the declared steps at the end, when the schedule lets the weights settle."""
DECAYED = 0.1
"""Fraction of its peak below which a learning rate counts as decayed."""


class Phase(StrEnum):
    """How far along a run is, in words that follow `typical`."""

    EARLY = "early in a run"
    MIDDLE = "in the middle of a run"
    LATE = "late in a run"


class Band(NamedTuple):
    """A range of healthy values."""

    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.low:.0e} to {self.high:.0e}".replace("e-0", "e-")


UPDATE_RATIO = {Phase.EARLY: Band(1e-3, 1e-2), Phase.MIDDLE: Band(1e-4, 1e-3), Phase.LATE: Band(1e-5, 1e-4)}
"""The healthy range of `monitor/update_ratio_median` in each phase."""


@dataclass(frozen=True, slots=True)
class Rate:
    """A learning rate so far: first, previous, current and highest value; NaN if there is none."""

    first: float = math.nan
    before: float = math.nan
    now: float = math.nan
    peak: float = math.nan
    """The highest value so far; a view does not see the peak that an optimizer group declares (`types.peak_lr`)."""

    @classmethod
    def of(cls, values: ArrayLike) -> Self:
        """The rate over these values, oldest first; non-finite values are skipped."""
        recorded = np.asarray(values, np.float64)
        finite = recorded[np.isfinite(recorded)]
        if not len(finite):
            return cls()
        return cls(float(finite[0]), float(finite[-2:][0]), float(finite[-1]), float(finite.max()))

    def then(self, value: float) -> Self:
        """The rate with one more value."""
        return self.of([self.first, self.peak, self.now, value]) if math.isfinite(value) else self

    @property
    def warms_up(self) -> bool:
        """Whether it has just reached a new peak; a restart rises too, but not above its earlier peak."""
        return self.before < self.now == self.peak

    @property
    def has_decayed(self) -> bool:
        return self.now < DECAYED * self.peak

    @property
    def is_constant(self) -> bool:
        """Whether it says nothing about the phase of the run."""
        return math.isnan(self.now) or self.first == self.before == self.now == self.peak


def phase(step: int, total_steps: float | None, rate: Rate) -> Phase | None:
    """The phase of a run, from the declared number of steps and the learning rate; None if neither shows it."""
    share = math.nan if not total_steps else (step + 1) / total_steps
    if rate.warms_up or share <= EARLY_SHARE:
        return Phase.EARLY
    if rate.has_decayed or share > 1 - LATE_SHARE:
        return Phase.LATE
    return None if math.isnan(share) and rate.is_constant else Phase.MIDDLE


def update_ratio_words(now: Phase | None) -> str:
    """`typical in the middle of a run 1e-4 to 1e-3`; all bands if the phase is unknown."""
    bands = UPDATE_RATIO if now is None else {now: UPDATE_RATIO[now]}
    return "typical " + ", ".join(f"{when} {band}" for when, band in bands.items())
