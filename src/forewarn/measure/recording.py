"""Turns readings into the blocks that are stored and judged."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from forewarn.measure.engine import Value
from forewarn.measure.own_probes import checked_readings
from forewarn.measure.probe import Array, Histograms, Pending, Probe, Reading
from forewarn.measure.step import Step
from forewarn.rows import Row, Sheet, layout_of
from forewarn.types import Block, Distribution, Values


class Collected(NamedTuple):
    """The readings of one step on their way to the host."""

    step: int
    time: float
    context: Step
    pending: list[tuple[Probe, Pending]]
    known: Sequence[Reading | Histograms] = ()
    """The readings that were decoded already; they come before the others."""
    is_late: bool = False
    """Whether these values were given after the step, perhaps on one rank only."""
    wishes: Sequence[bool] | None = None
    """What this rank said to the others as the step ended; None to say it when the step is sent."""

    @property
    def tensors(self) -> list[Value]:
        """The tensors that must arrive before the readings can be decoded."""
        return [tensor for _, pending in self.pending for tensor in pending.tensors]

    def readings(self, arrays: Sequence[Array], guard: Callable[..., Any]) -> list[Reading | Histograms]:
        """The readings, decoded from the arrays; `guard` calls into a probe and catches its exceptions."""
        readings = list(self.known)
        for probe, pending in self.pending:
            own_arrays, arrays = arrays[: len(pending.tensors)], arrays[len(pending.tensors) :]
            readings += guard(probe, decoded, probe, pending, own_arrays) or []
        others = self.context.other_stages
        if others is None:
            return readings
        for metric, reason in others.reasons.items():
            if reason or metric not in self.context.reasons:
                self.context.unavailable(metric, reason)
        return list(others.joined(readings))


def decoded(probe: Probe, pending: Pending, arrays: Sequence[Array]) -> list[Reading | Histograms]:
    """The readings of one probe; raises whatever the probe raises, or ValueError if a user's own gives a wrong one."""
    readings = pending.decode(arrays)
    if probe.metrics is not None:
        readings = checked_readings(probe, readings)
    return readings if type(readings) is list else list(readings)


def recorded(
    step: int, time: float, readings: Sequence[Reading | Histograms]
) -> tuple[Sequence[Block], list[Distribution]]:
    """The blocks of one step, stored as float32, and its histograms."""
    if (row := _row(step, time, readings)) is not None:
        return row, []
    distributions = [Distribution(step, time, *reading) for reading in readings if type(reading) is Histograms]
    if distributions:
        readings = [reading for reading in readings if type(reading) is not Histograms]
    with np.errstate(over="ignore"):
        sheet = _sheet(step, time, readings)  # type: ignore[arg-type]
        if sheet is not None:
            return sheet, distributions
        blocks = [
            Block(step, time, name, scopes, _stored(values, len(scopes)))
            for name, scopes, values in merged(readings)  # type: ignore[arg-type]
        ]
    return blocks, distributions


def _sheet(step: int, time: float, readings: Sequence[Reading]) -> Sheet | None:
    """The readings in one array; None if there are several of one name, or not one number for each scope."""
    layout = layout_of([reading[0] for reading in readings], [reading[1] for reading in readings])
    if layout is None or not readings:
        return None
    packed = np.empty(layout.starts[-1], np.float32)
    for (_, scopes, values), start in zip(readings, layout.starts, strict=False):
        if type(values) is float:
            if len(scopes) != 1:
                return None
            packed[start] = values
        else:
            numbers = values if type(values) is np.ndarray else np.asarray(values)
            if numbers.size != len(scopes) or numbers.ndim > 1:
                return None
            packed[start : start + numbers.size] = numbers
    return Sheet(step, time, layout, packed)


def _row(step: int, time: float, readings: Sequence[Reading | Histograms]) -> Row | None:
    """The readings as a row of numbers, as on every step without detail; None if they are not all plain numbers."""
    if not readings:
        return None
    numbers: list[Any] = []
    for reading in readings:
        scopes, values = reading[1], reading[2]
        if (type(values) is float or type(values) is int) and len(scopes) == 1:
            numbers.append(values)
        elif type(values) is list and len(values) == len(scopes):
            numbers += values
        else:
            return None
    layout = layout_of([reading[0] for reading in readings], [reading[1] for reading in readings])
    if layout is None:
        return None
    try:
        return Row(step, time, layout, numbers)
    except (TypeError, ValueError, OverflowError):
        return None


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
