"""The values logged in one step: on the device until the step ends, then on the host in one transfer."""

from __future__ import annotations

import logging
import math
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forewarn.measure.engine import Measurement, Numbers, in_order
from forewarn.measure.engine.portable import wide
from forewarn.measure.engine.statistics import COLUMNS
from forewarn.measure.metric_kinds import Aggregate, Keys, quantities
from forewarn.measure.over_ranks import How, Part
from forewarn.measure.probe import Array
from forewarn.measure.ranks import ELEMENTS, OWN, ROWS, Ranks, Total, summands, whole
from forewarn.measure.transfer import Transfer

_device_of, _dtype_of = attrgetter("device"), attrgetter("dtype")


@dataclass(frozen=True, slots=True)
class Settled:
    """The values of one step on the host."""

    totals: list[Total]
    shards: list[tuple[Keys, Array]]
    """Rows of tensor shards, which become quantities only once the rows of all ranks are added up."""
    failures: dict[str, Exception]
    """Keys whose aggregation function raised."""

    def over(self, ranks: Ranks, logger: logging.Logger) -> Settled:
        """The same step with the values of all ranks."""
        totals, shards = ranks.reduced(self.totals, self.shards, logger)
        return Settled(totals, shards, self.failures)

    def exchanged(self) -> tuple[list[Array], list[Part], Callable[[Sequence[Array]], Settled]]:
        """The arrays to combine over ranks, how, and how to read the combined ones."""
        own = [total for total in self.totals if total.how == OWN]
        most = [total for total in self.totals if total.how == "max"]
        added = [total for total in self.totals if total.how not in (OWN, "max")]
        keys = [keys for keys, _ in self.shards]
        arrays = [
            np.array([summands(total) for total in added]).reshape(-1, 2),
            np.array([total.value if total.weight else math.nan for total in most]),
            np.array([row for _, row in self.shards]).reshape(len(keys), len(COLUMNS)),
        ]
        parts = [
            Part(How.SUM, f"sums {_mark(total.key for total in added)}"),
            Part(How.MAX, f"most {_mark(total.key for total in most)}"),
            Part(How.ROWS, f"rows {_mark(map(str, keys))}"),
        ]

        def combined(arrays: Sequence[Array]) -> Settled:
            sums, largest, rows = arrays
            totals = [
                whole(total, sum_, weight, 0.0) for total, (sum_, weight) in zip(added, sums.tolist(), strict=True)
            ]
            totals += [whole(total, 0.0, 0.0, number) for total, number in zip(most, largest.tolist(), strict=True)]
            return Settled([*own, *totals], list(zip(keys, rows, strict=True)), self.failures)

        return arrays, parts, combined

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
"""The values of a step in transfer, and how to decode them when they have arrived."""


@dataclass(slots=True)
class _Gathered:
    """The values of a key with its own aggregation function."""

    aggregate: Aggregate
    tensors: list[Tensor] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    """Indices of the single numbers that belong to it."""


class StepLog:
    """Collects device values under keys without waiting for them."""

    def __init__(self) -> None:
        self._numbers: list[tuple[str, Tensor | float, float, str]] = []
        """Key, value, weight, and how ranks reduce it."""
        self._rows: list[tuple[Sequence[Keys], Measurement, str]] = []
        self._gathered: dict[str, _Gathered] = {}

    def __bool__(self) -> bool:
        return bool(self._numbers or self._rows or self._gathered)

    def number(self, key: str, value: Tensor | float, weight: float = 1.0, how: str = OWN) -> None:
        """Log one number, on its device or on the host."""
        if isinstance(value, Tensor) and value.requires_grad:
            value = value.detach()
        self._numbers.append((key, value, weight, how))

    def tensor(self, key: str, value: Tensor | float, aggregate: Aggregate | None) -> None:
        """Log the elements of a tensor, to be averaged when the step ends; the tensor must not change any more.

        Only their sum is kept, unless `aggregate` needs all of them.
        """
        if aggregate is not None:
            self._gather(key, aggregate).tensors.append(torch.as_tensor(value).detach().flatten())
        elif not isinstance(value, Tensor) or value.dim() == 0:
            self.number(key, value, 1.0, ELEMENTS)
        elif value.numel():
            self.number(key, value.detach().sum(dtype=wide(value.device)), float(value.numel()), ELEMENTS)

    def scalar(self, key: str, value: Tensor | float, aggregate: Aggregate) -> None:
        """Log one of several numbers under a key; `aggregate` takes them as a list."""
        self._gather(key, aggregate).places.append(len(self._numbers))
        self.number("", value)

    def rows(self, keys: Sequence[Keys], measurement: Measurement, how: str) -> None:
        """Log the statistics engine's rows of many tensors, with the keys of each."""
        self._rows.append((keys, measurement, how))

    def aggregate_rows(self, key: str, aggregate: Aggregate) -> None:
        """Apply `aggregate` to the built-in quantity logged under a key, as a tensor of its values."""
        self._gather(key, aggregate)

    def _gather(self, key: str, aggregate: Aggregate) -> _Gathered:
        entry = self._gathered.setdefault(key, _Gathered(aggregate))
        entry.aggregate = aggregate
        return entry

    def settle(self) -> Settled:
        """Bring everything to the host: the step's only transfer."""
        tensors, unpack = self.pack()
        transfer: Transfer[None] = Transfer()
        transfer.send(None, tensors)
        [(_, arrays)] = transfer.receive(wait=True)
        return unpack(arrays)

    def pack(self) -> Packed:
        """Everything in a few tensors, ready for one transfer; aggregation functions run first, on the device."""
        failures: dict[str, Exception] = {}
        extra: list[tuple[str, Any]] = []
        for key, entry in self._gathered.items():
            if entry.tensors:
                extra += _aggregated(key, entry.aggregate, torch.cat(entry.tensors), failures)
        values = [*(value for _, value, _, _ in self._numbers), *(value for _, value in extra)]
        stacks, places = _stacked(values)

        def unpack(arrays: Sequence[Array]) -> Settled:
            numbers = np.array([math.nan if isinstance(value, Tensor) else float(value) for value in values])
            for indices, array in zip(places, arrays, strict=False):
                numbers[indices] = array
            num_logged = len(self._numbers)
            logged = zip(self._numbers, numbers[:num_logged].tolist(), strict=True)
            totals = [Total(key, value, weight, how) for (key, _, weight, how), value in logged if key]
            totals += [Total(key, float(value)) for (key, _), value in zip(extra, numbers[num_logged:], strict=True)]
            rows: dict[str, tuple[list[Keys], list[Array]]] = {OWN: ([], []), ELEMENTS: ([], []), ROWS: ([], [])}
            start = len(stacks)
            for keys, measurement, how in self._rows:
                parts = arrays[start : (start := start + len(measurement.rows))]
                rows[how][0].extend(keys)
                rows[how][1].append(in_order(measurement.order, parts))
            gathered: dict[str, list[float]] = {}
            for total in (*row_totals(*rows[OWN], OWN), *row_totals(*rows[ELEMENTS], ELEMENTS)):
                if self._gathered and total.key in self._gathered:
                    gathered.setdefault(total.key, []).append(total.value)
                else:
                    totals.append(total)
            late: dict[str, Any] = {key: torch.tensor(gathered_values) for key, gathered_values in gathered.items()}
            late |= {key: numbers[entry.places].tolist() for key, entry in self._gathered.items() if entry.places}
            for key, gathered_values in late.items():
                aggregated = _aggregated(key, self._gathered[key].aggregate, gathered_values, failures)
                totals.extend(Total(name, float(value)) for name, value in aggregated)
            shards = [row for part in rows[ROWS][1] for row in part]
            return Settled(totals, list(zip(rows[ROWS][0], shards, strict=True)), failures)

        return [*stacks, *(part for _, measurement, _ in self._rows for part in measurement.rows)], unpack


def _mark(keys: Iterable[str]) -> int:
    """Equal on two ranks if their keys are."""
    return zlib.crc32("\n".join(keys).encode(errors="replace"))


def row_totals(keys: Sequence[Keys], parts: Sequence[Array], how: str) -> list[Total]:
    """The requested quantities of the statistics engine's rows, which come in parts."""
    if not parts:
        return []
    columns = quantities(np.concatenate(parts))
    asked = {quantity for row_keys in set(keys) for _, quantity in row_keys}
    values = {quantity: columns[quantity].tolist() for quantity in asked}
    return [
        Total(key, values[quantity][row], 1.0, how) for row, row_keys in enumerate(keys) for key, quantity in row_keys
    ]


def _aggregated(
    key: str, aggregate: Aggregate, values: Any, failures: dict[str, Exception]
) -> list[tuple[str, Tensor | float]]:
    """The result of an aggregation: one number under the key, or several under the key with suffixes."""
    try:
        result = aggregate(values)
        parts = result.items() if isinstance(result, Mapping) else [("", result)]
        return [(key + suffix, value) for suffix, value in parts]
    except Exception as error:
        failures[key] = error
        return []


def _stacked(values: Sequence[Tensor | float]) -> tuple[list[Tensor], list[list[int]]]:
    """Many single numbers as one tensor per device and dtype, with the indices of its elements."""
    places = [index for index, value in enumerate(values) if isinstance(value, Tensor)]
    numbers: list[Any] = [values[index] for index in places]
    kinds = list(zip(map(_device_of, numbers), map(_dtype_of, numbers), strict=True))
    stacks, indices = [], []
    for kind in dict.fromkeys(kinds):
        members = [index for index, own_kind in enumerate(kinds) if own_kind == kind]
        alike = (numbers[index] for index in members)
        stacks.append(torch.stack([number if number.dim() == 0 else number.reshape(()) for number in alike]))
        indices.append([places[index] for index in members])
    return stacks, indices
