"""What was logged in one step: on the device until the step ends, then on the host in one transfer."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forewarn.measure.engine import Measurement, Numbers, in_order
from forewarn.measure.engine.portable import wide
from forewarn.measure.metric_kinds import Aggregate, Keys, quantities
from forewarn.measure.probe import Array
from forewarn.measure.ranks import ELEMENTS, OWN, ROWS, Ranks, Total
from forewarn.measure.transfer import Transfer

_device_of, _dtype_of = attrgetter("device"), attrgetter("dtype")


@dataclass(frozen=True, slots=True)
class Settled:
    """A step on the host."""

    totals: list[Total]
    shards: list[tuple[Keys, Array]]
    """Rows of parts of tensors, which only become quantities once those of all ranks are added up."""
    failures: dict[str, Exception]
    """Keys whose aggregation function raised."""

    def over(self, ranks: Ranks, logger: logging.Logger) -> Settled:
        """The same step with the values of all ranks."""
        totals, shards = ranks.reduced(self.totals, self.shards, logger)
        return Settled(totals, shards, self.failures)

    def averages(self) -> dict[str, float]:
        """The value of each key: the mean over all its elements."""
        sums: dict[str, float] = {}
        weights: dict[str, float] = {}
        keys, rows = [keys for keys, _ in self.shards], [row[None] for _, row in self.shards]
        for key, value, weight, _ in [*self.totals, *row_totals(keys, rows, OWN)]:
            sums[key] = sums.get(key, 0.0) + value
            weights[key] = weights.get(key, 0.0) + weight
        return {key: sums[key] / weights[key] for key in sums if weights[key]}


Packed = tuple[list[Numbers], Callable[[Sequence[Array]], "Settled"]]
"""The values of a step on their way, and how to read them when they have arrived."""


@dataclass(slots=True)
class _Gathered:
    """The values of a key that has an aggregation function of its own."""

    aggregate: Aggregate
    tensors: list[Tensor] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    """Which of the single numbers belong to it."""


class StepLog:
    """Collects device values under keys without waiting for them."""

    def __init__(self) -> None:
        self._numbers: list[tuple[str, Tensor | float, float, str]] = []
        """Key, value, weight, and what the ranks make of it."""
        self._rows: list[tuple[Sequence[Keys], Measurement, str]] = []
        self._gathered: dict[str, _Gathered] = {}

    def __bool__(self) -> bool:
        return bool(self._numbers or self._rows or self._gathered)

    def number(self, key: str, value: Tensor | float, weight: float = 1.0, how: str = OWN) -> None:
        """One number, on its device or on the host."""
        if isinstance(value, Tensor) and value.requires_grad:
            value = value.detach()
        self._numbers.append((key, value, weight, how))

    def tensor(self, key: str, value: Tensor | float, aggregate: Aggregate | None) -> None:
        """The elements of a tensor that nobody changes any more, to be averaged in the end.

        Only their sum is kept, unless `aggregate` needs all of them.
        """
        if aggregate is not None:
            self._gather(key, aggregate).tensors.append(torch.as_tensor(value).detach().flatten())
        elif not isinstance(value, Tensor) or value.dim() == 0:
            self.number(key, value, 1.0, ELEMENTS)
        elif value.numel():
            self.number(key, value.detach().sum(dtype=wide(value.device)), float(value.numel()), ELEMENTS)

    def scalar(self, key: str, value: Tensor | float, aggregate: Aggregate) -> None:
        """A number among several of its key, which `aggregate` takes as a list."""
        self._gather(key, aggregate).places.append(len(self._numbers))
        self.number("", value)

    def rows(self, keys: Sequence[Keys], found: Measurement, how: str) -> None:
        """What the statistics engine said of many tensors, with what is asked of each."""
        self._rows.append((keys, found, how))

    def aggregate_rows(self, key: str, aggregate: Aggregate) -> None:
        """Let `aggregate` have the built-in quantity that is logged under a key, as a tensor of its values."""
        self._gather(key, aggregate)

    def _gather(self, key: str, aggregate: Aggregate) -> _Gathered:
        entry = self._gathered.setdefault(key, _Gathered(aggregate))
        entry.aggregate = aggregate
        return entry

    def settle(self) -> Settled:
        """Bring all of it to the host: the step's only transfer."""
        tensors, unpack = self.pack()
        transfer: Transfer[None] = Transfer()
        transfer.send(None, tensors)
        [(_, arrays)] = transfer.receive(wait=True)
        return unpack(arrays)

    def pack(self) -> Packed:
        """All of it as few tensors, ready to travel together; aggregation functions run first, on the device."""
        failures: dict[str, Exception] = {}
        extra: list[tuple[str, Any]] = []
        for key, entry in self._gathered.items():
            if entry.tensors:
                extra += _aggregated(key, entry.aggregate, torch.cat(entry.tensors), failures)
        values = [*(value for _, value, _, _ in self._numbers), *(value for _, value in extra)]
        stacks, places = _stacked(values)

        def unpack(arrays: Sequence[Array]) -> Settled:
            numbers = np.array([math.nan if isinstance(each, Tensor) else float(each) for each in values])
            for which, array in zip(places, arrays, strict=False):
                numbers[which] = array
            own = len(self._numbers)
            logged = zip(self._numbers, numbers[:own].tolist(), strict=True)
            totals = [Total(key, value, weight, how) for (key, _, weight, how), value in logged if key]
            totals += [Total(key, float(value)) for (key, _), value in zip(extra, numbers[own:], strict=True)]
            rows: dict[str, tuple[list[Keys], list[Array]]] = {OWN: ([], []), ELEMENTS: ([], []), ROWS: ([], [])}
            at = len(stacks)
            for keys, found, how in self._rows:
                parts = arrays[at : (at := at + len(found.rows))]
                rows[how][0].extend(keys)
                rows[how][1].append(in_order(found.order, parts))
            whole: dict[str, list[float]] = {}
            for each in (*row_totals(*rows[OWN], OWN), *row_totals(*rows[ELEMENTS], ELEMENTS)):
                if self._gathered and each.key in self._gathered:
                    whole.setdefault(each.key, []).append(each.value)
                else:
                    totals.append(each)
            late: dict[str, Any] = {key: torch.tensor(several) for key, several in whole.items()}
            late |= {key: numbers[entry.places].tolist() for key, entry in self._gathered.items() if entry.places}
            for key, several in late.items():
                found_now = _aggregated(key, self._gathered[key].aggregate, several, failures)
                totals.extend(Total(name, float(value)) for name, value in found_now)
            shards = [row for part in rows[ROWS][1] for row in part]
            return Settled(totals, list(zip(rows[ROWS][0], shards, strict=True)), failures)

        return [*stacks, *(part for _, found, _ in self._rows for part in found.rows)], unpack


def row_totals(keys: Sequence[Keys], parts: Sequence[Array], how: str) -> list[Total]:
    """The quantities that are asked of the rows of the statistics engine, which come in parts."""
    if not parts:
        return []
    found = quantities(np.concatenate(parts))
    values = {quantity: found[quantity].tolist() for quantity in {one for asked in set(keys) for _, one in asked}}
    return [Total(key, values[one][at], 1.0, how) for at, asked in enumerate(keys) for key, one in asked]


def _aggregated(
    key: str, aggregate: Aggregate, values: Any, failures: dict[str, Exception]
) -> list[tuple[str, Tensor | float]]:
    """What an aggregation gave: a number under the key, or several under the key with their suffixes."""
    try:
        result = aggregate(values)
        parts = result.items() if isinstance(result, Mapping) else [("", result)]
        return [(key + suffix, one) for suffix, one in parts]
    except Exception as error:
        failures[key] = error
        return []


def _stacked(values: Sequence[Tensor | float]) -> tuple[list[Tensor], list[list[int]]]:
    """Many single numbers as one tensor for each device and type, with the places of its elements."""
    places = [at for at, value in enumerate(values) if isinstance(value, Tensor)]
    numbers: list[Any] = [values[at] for at in places]
    kinds = list(zip(map(_device_of, numbers), map(_dtype_of, numbers), strict=True))
    stacks, where = [], []
    for kind in dict.fromkeys(kinds):
        alike = [at for at, each in enumerate(kinds) if each == kind]
        stacks.append(torch.stack([numbers[at] if numbers[at].dim() == 0 else numbers[at].reshape(()) for at in alike]))
        where.append([places[at] for at in alike])
    return stacks, where
