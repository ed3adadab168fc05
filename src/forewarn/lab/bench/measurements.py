"""What a benchmark found, as plain data: the table, the page, the plot and the JSON are all made from this."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np


@dataclass(frozen=True, slots=True)
class Spread:
    """A median with its quartiles: half of all rounds lie between `low` and `high`."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        low, median, high = np.percentile(values, [25, 50, 75])
        return cls(float(median), float(low), float(high))


@dataclass(frozen=True, slots=True)
class Visits:
    """CPU seconds of one visit of as many numbers as all gradients hold."""

    read: float
    """By a streaming read of one piece of memory: the limit."""
    rows: float
    """By forewarn's engine, tensor by tensor, for everything but histograms."""
    histograms: float
    """The same with full histograms."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What one contender adds to the bare step."""

    name: str
    description: str
    added_share: Spread
    """Of the bare step beside it: 0.1 is 10% more."""
    added_seconds: Spread
    reads: float
    """The added time in streaming reads of all gradients."""
    operations: float
    """Torch operations added per step."""
    syncs: float
    """Operations added per step that wait for the device."""
    held_bytes: int
    """Memory held in addition at the end of a turn."""


@dataclass(frozen=True, slots=True)
class Judging:
    """CPU seconds of all rules together, by what there was to judge; None where no such step was run."""

    measured: Spread | None
    unmeasured: Spread | None
    depth: int
    """Steps of history that the rules looked back on, at the end."""


@dataclass(frozen=True, slots=True)
class Absent:
    """A contender that was asked for and did not run to the end."""

    name: str
    description: str
    reason: str


@dataclass(frozen=True, slots=True)
class WorkloadResult:
    """One workload, with the cost of every contender on it."""

    name: str
    description: str
    num_parameters: int
    num_tensors: int
    optimizer: str
    rounds: int
    steps: int
    """Timed steps per contender and round."""
    bare_seconds: Spread
    bare_operations: float
    bare_syncs: float
    visits: Visits
    backend: str
    """What forewarn read the tensors with; empty if it did not take part."""
    costs: tuple[Cost, ...]
    judging: Judging | None
    absent: tuple[Absent, ...]


@dataclass(frozen=True, slots=True)
class Line:
    """A straight line through points by least squares, and how well they lie on it."""

    slope: float
    intercept: float
    r_squared: float

    @classmethod
    def through(cls, x: Sequence[float], y: Sequence[float]) -> Self:
        slope, intercept = np.polyfit(x, y, 1)
        residual = np.asarray(y) - (slope * np.asarray(x) + intercept)
        total = np.asarray(y) - np.mean(y)
        scatter = float(total @ total)
        return cls(float(slope), float(intercept), 1 - float(residual @ residual) / scatter if scatter else 1.0)


@dataclass(frozen=True, slots=True)
class Scaling:
    """How the cost of a step grows along one axis while the other stays fixed."""

    axis: str
    """`elements` or `tensors`."""
    fixed: str
    sizes: tuple[int, ...]
    measured_seconds: tuple[float, ...]
    unmeasured_seconds: tuple[float, ...]
    line: Line
    """Through the measured steps."""
    left_out: tuple[int, ...]
    """Sizes that the memory of this machine does not allow."""
