"""Turns readings into the blocks that are stored and judged."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from forewarn.measure.engine import Numbers
from forewarn.measure.own_probes import checked_readings
from forewarn.measure.probe import Array, Histograms, Pending, Probe, Reading
from forewarn.measure.step import Step
from forewarn.types import Block, Distribution, Values


@dataclass(frozen=True, slots=True)
class Collected:
    """The readings of one step on their way to the host."""

    step: int
    time: float
    context: Step
    pending: list[tuple[Probe, Pending]]
    is_late: bool = False
    """Whether these values were given after the step, perhaps on one rank only."""

    @property
    def tensors(self) -> list[Numbers]:
        """The tensors that must arrive before the readings can be decoded."""
        return [tensor for _, pending in self.pending for tensor in pending.tensors]

    def readings(self, arrays: list[Array], guard: Callable[..., Any]) -> list[Reading | Histograms]:
        """The readings, decoded from the arrays; `guard` calls into a probe and catches its exceptions."""
        readings: list[Reading | Histograms] = []
        for probe, pending in self.pending:
            own_arrays, arrays = arrays[: len(pending.tensors)], arrays[len(pending.tensors) :]
            readings += guard(probe, _decoded, probe, pending, own_arrays) or []
        others = self.context.other_stages
        if others is None:
            return readings
        for metric, reason in others.reasons.items():
            if reason or metric not in self.context.reasons:
                self.context.unavailable(metric, reason)
        return list(others.joined(readings))


def _decoded(probe: Probe, pending: Pending, arrays: Sequence[Array]) -> list[Reading | Histograms]:
    readings = pending.decode(arrays)
    return list(readings if probe.metrics is None else checked_readings(probe, readings))


def recorded(
    step: int, time: float, readings: Sequence[Reading | Histograms]
) -> tuple[list[Block], list[Distribution]]:
    """The blocks of one step, stored as float32, and its histograms."""
    distributions = [Distribution(step, time, *reading) for reading in readings if isinstance(reading, Histograms)]
    with np.errstate(over="ignore"):
        blocks = [
            Block(step, time, name, scopes, _stored(values, len(scopes)))
            for name, scopes, values in merged(reading for reading in readings if isinstance(reading, Reading))
        ]
    return blocks, distributions


def _stored(values: Any, num_scopes: int) -> Values:
    if type(values) is float and num_scopes == 1:  # as on every step
        return np.array([values], np.float32)
    return np.asarray(values, dtype=np.float32).reshape(num_scopes)


def merged(readings: Iterable[Reading]) -> list[Reading]:
    """One reading per name: readings of several probes under one name are merged."""
    by_name: dict[str, Reading] = {}
    for reading in readings:
        earlier = by_name.get(reading.name)
        by_name[reading.name] = reading if earlier is None else _joined(earlier, reading)
    return list(by_name.values())


def _joined(first: Reading, second: Reading) -> Reading:
    """Merge two readings; if both have a value for a scope, the later one wins."""
    values: dict[str, float] = {}
    for reading in (first, second):
        values |= zip(reading.scopes, np.asarray(reading.values, np.float64).reshape(len(reading.scopes)), strict=True)
    return Reading(first.name, tuple(values), list(values.values()))
