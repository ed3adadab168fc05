"""Readings in the form in which they are stored and judged."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from forewarn.measure.engine import Numbers
from forewarn.measure.own_probes import checked
from forewarn.measure.probe import Array, Histograms, Pending, Probe, Reading
from forewarn.measure.step import Step
from forewarn.types import Block, Distribution


@dataclass(frozen=True, slots=True)
class Collected:
    """What was collected at one step, on its way to the host."""

    step: int
    time: float
    context: Step
    pending: list[tuple[Probe, Pending]]

    @property
    def tensors(self) -> list[Numbers]:
        """What has to arrive before it can be read."""
        return [tensor for _, pending in self.pending for tensor in pending.tensors]

    def readings(self, arrays: list[Array], guard: Callable[..., Any]) -> list[Reading | Histograms]:
        """The readings, once the tensors are there as arrays; `guard` calls into a probe and keeps what it raises."""
        found: list[Reading | Histograms] = []
        for probe, pending in self.pending:
            own, arrays = arrays[: len(pending.tensors)], arrays[len(pending.tensors) :]
            found += guard(probe, _decoded, probe, pending, own) or []
        return found


def _decoded(probe: Probe, pending: Pending, arrays: Sequence[Array]) -> list[Reading | Histograms]:
    readings = pending.decode(arrays)
    return list(readings if probe.metrics is None else checked(probe, readings))


def recorded(
    step: int, time: float, readings: Sequence[Reading | Histograms]
) -> tuple[list[Block], list[Distribution]]:
    """The blocks and the histograms of one step, in float32 from here on."""
    distributions = [Distribution(step, time, *each) for each in readings if isinstance(each, Histograms)]
    with np.errstate(over="ignore"):
        blocks = [
            Block(step, time, name, scopes, np.asarray(values, dtype=np.float32).reshape(len(scopes)))
            for name, scopes, values in merged(each for each in readings if isinstance(each, Reading))
        ]
    return blocks, distributions


def merged(readings: Iterable[Reading]) -> list[Reading]:
    """One reading per name: what several probes say under the same name becomes one with all their scopes."""
    by_name: dict[str, Reading] = {}
    for one in readings:
        known = by_name.get(one.name)
        by_name[one.name] = one if known is None else _joined(known, one)
    return list(by_name.values())


def _joined(first: Reading, second: Reading) -> Reading:
    """Both under one name; of two values for the same scope the later one stands."""
    values: dict[str, float] = {}
    for each in (first, second):
        values |= zip(each.scopes, np.asarray(each.values, np.float64).reshape(len(each.scopes)), strict=True)
    return Reading(first.name, tuple(values), list(values.values()))
