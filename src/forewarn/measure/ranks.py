"""Reduces the values of a step over the processes that train one model, with one packed sum and one maximum."""

from __future__ import annotations

import logging
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from forewarn.measure.probe import Array

OWN = "own"
"""Every rank has the same value, or keeps its own."""
ELEMENTS = "elements"
"""The value is a sum over `weight` elements; the elements of all ranks count equally."""
ROWS = "rows"
"""The row of one shard: the rows of all shards add up to the row of the whole tensor."""


class Total(NamedTuple):
    """One logged value on the host, before it is reduced over ranks and averaged over the micro-batches."""

    key: str
    value: float
    weight: float = 1.0
    how: str = OWN


Shards = list[tuple[Any, Array]]
"""The keys of a tensor, and the statistics engine's row for the part that this rank holds."""

_LEAST, _MOST = 3, 4
"""The columns of the statistics engine that do not add up: min and max."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """The process groups that values are reduced over: none in a single process or without DDP or FSDP2."""

    everyone: tuple[Any, ...] = ()
    """Process groups of the ranks that see other data: activations are averaged over all their elements."""
    shards: tuple[Any, ...] = ()
    """Process groups of the ranks that hold the other shards of the parameters."""
    device: torch.device | None = None

    @classmethod
    def of(cls, model: nn.Module) -> Ranks:
        if not (dist.is_available() and dist.is_initialized()):
            return cls()
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        for module in model.modules():
            if isinstance(module, nn.parallel.DistributedDataParallel):
                return cls(_shared([module.process_group]), (), device)
        for parameter in model.parameters():
            mesh = getattr(parameter, "device_mesh", None)
            if mesh is not None:
                placements: Sequence[Any] = parameter.placements  # type: ignore[attr-defined]
                parts = [mesh.get_group(dim) for dim, placement in enumerate(placements) if placement.is_shard()]
                return cls(_shared(mesh.get_all_groups()), _shared(parts), device)
        return cls()

    def reduced(self, totals: list[Total], rows: Shards, logger: logging.Logger) -> tuple[list[Total], Shards]:
        """The reduced values, the same on every rank. Values that only some ranks have are left out."""
        own = [total for total in totals if total.how == OWN]
        per_element = [total for total in totals if total.how == ELEMENTS]
        parts = [total for total in totals if total.how not in (OWN, ELEMENTS)]
        if not (self.everyone or parts or rows):
            return totals, rows
        if self.everyone == self.shards:
            reduced, rows = self._over(self.everyone, [*per_element, *parts], rows, logger)
            return [*own, *reduced], rows
        means, _ = self._over(self.everyone, per_element, [], logger)
        reduced, rows = self._over(self.shards, parts, rows, logger)
        return [*own, *means, *reduced], rows

    def _over(
        self, groups: Sequence[Any], totals: list[Total], rows: Shards, logger: logging.Logger
    ) -> tuple[list[Total], Shards]:
        for group in groups:
            names = [*(total.key for total in totals), *(str(keys) for keys, _ in rows)]
            common = self._common(names, group)
            if common is not None:
                logger.warning("the ranks logged different metrics; %d of them are left out", len(names) - len(common))
                totals, rows = (
                    [total for index, total in enumerate(totals) if index in common],
                    [row for index, row in enumerate(rows, start=len(totals)) if index in common],
                )
        sums = [summand for total in totals for summand in summands(total)]
        most = [total.value if total.how == "max" and total.weight else -np.inf for total in totals]
        for _, row in rows:
            sums += np.delete(row, [_LEAST, _MOST]).tolist()
            most += [-row[_LEAST], row[_MOST]]
        sums, most = self._all(sums, groups, "SUM"), self._all(most, groups, "MAX")
        reduced = [
            whole(total, sums[2 * index], sums[2 * index + 1], most[index]) for index, total in enumerate(totals)
        ]
        first, first_most = 2 * len(totals), len(totals)
        added = []
        for index, (keys, _) in enumerate(rows):
            count, total, squares, zeros, nonfinite = sums[first + 5 * index : first + 5 * index + 5]
            least, greatest = most[first_most + 2 * index : first_most + 2 * index + 2]
            added.append((keys, np.array([count, total, squares, -least, greatest, zeros, nonfinite])))
        return reduced, added

    def _all(self, values: list[float], groups: Sequence[Any], how: str) -> list[float]:
        if not values or not groups:
            return values
        packed = torch.tensor(values, dtype=torch.float64, device=self.device)
        for group in groups:
            dist.all_reduce(packed, getattr(dist.ReduceOp, how), group=group)
        reduced: list[float] = packed.tolist()
        return reduced

    def _common(self, names: Sequence[str], group: Any) -> set[int] | None:
        """Indices of the names that every rank has logged; None, after one small message, if all logged the same."""
        mark = float(zlib.crc32("\n".join(names).encode()))
        marks = torch.tensor([mark, -mark], dtype=torch.float64, device=self.device)
        dist.all_reduce(marks, dist.ReduceOp.MAX, group=group)
        if float(marks[0]) == -float(marks[1]):
            return None
        numbered = list(_numbered(names))
        everywhere: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(everywhere, numbered, group=group)
        common = set(everywhere[0]).intersection(*everywhere[1:])
        return {index for index, name in enumerate(numbered) if name in common}


def _shared(groups: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(group for group in groups if dist.get_world_size(group) > 1)


def _numbered(names: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Each name with the number of times it came before."""
    counts: Counter[str] = Counter()
    for name in names:
        yield name, counts[name]
        counts[name] += 1


def summands(total: Total) -> tuple[float, float]:
    """The two numbers to add up over the ranks."""
    if not total.weight:  # an empty shard
        return 0.0, 0.0
    match total.how:
        case "l2":
            return total.value**2, 1.0
        case "mean":
            return total.value * total.weight, total.weight
        case _:
            return total.value, total.weight


def whole(total: Total, added: float, weight: float, most: float) -> Total:
    """The value over all ranks, from the sums."""
    match total.how:
        case "l2":
            return Total(total.key, float(np.sqrt(added)))
        case "mean":
            return Total(total.key, added / weight if weight else float("nan"))
        case "max":
            return Total(total.key, most)
        case "sum":
            return Total(total.key, added)
        case _:
            return Total(total.key, added, weight)
