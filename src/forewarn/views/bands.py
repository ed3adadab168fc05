"""The healthy band of the update ratio, which moves down as a run goes on: to be looked at, never an alert."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import ArrayLike

EARLY_SHARE = 0.1
"""Of the declared steps: the weights are still finding their scale."""
LATE_SHARE = 0.2
"""Of the declared steps, at the end: the schedule lets the weights settle."""
DECAYED = 0.1
"""Share of its peak below which a learning rate has done its work."""


class Phase(StrEnum):
    """Where in its course a run is, in words that follow `healthy`."""

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
"""Which part of the healthy range of `monitor/update_ratio_median` belongs to each phase."""


@dataclass(frozen=True, slots=True)
class Rate:
    """The course of a learning rate so far; NaN where there was none."""

    first: float = math.nan
    before: float = math.nan
    now: float = math.nan
    peak: float = math.nan

    @classmethod
    def of(cls, values: ArrayLike) -> Self:
        """The course over these values, oldest first; what is not finite is left out."""
        given = np.asarray(values, np.float64)
        known = given[np.isfinite(given)]
        if not len(known):
            return cls()
        return cls(float(known[0]), float(known[-2:][0]), float(known[-1]), float(known.max()))

    def then(self, value: float) -> Self:
        """The course with one more value."""
        return self.of([self.first, self.peak, self.now, value]) if math.isfinite(value) else self

    @property
    def warms_up(self) -> bool:
        """Whether it rises to where it never was: a restart rises too, but not above its earlier peak."""
        return self.before < self.now == self.peak

    @property
    def has_decayed(self) -> bool:
        return self.now < DECAYED * self.peak

    @property
    def is_constant(self) -> bool:
        """Whether it tells nothing about the course of the run."""
        return math.isnan(self.now) or self.first == self.before == self.now == self.peak


def phase(step: int, total_steps: float | None, rate: Rate) -> Phase | None:
    """Early, in the middle or late, by the declared number of steps and the learning rate; None if neither tells."""
    done = math.nan if not total_steps else (step + 1) / total_steps
    if rate.warms_up or done <= EARLY_SHARE:
        return Phase.EARLY
    if rate.has_decayed or done > 1 - LATE_SHARE:
        return Phase.LATE
    return None if math.isnan(done) and rate.is_constant else Phase.MIDDLE


def update_ratio_words(now: Phase | None) -> str:
    """`healthy in the middle of a run 1e-4 to 1e-3`; every band where the phase is not known."""
    bands = UPDATE_RATIO if now is None else {now: UPDATE_RATIO[now]}
    return "healthy " + ", ".join(f"{when} {band}" for when, band in bands.items())
