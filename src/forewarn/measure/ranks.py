"""Several processes that train one model: their values of a step become one, by one packed sum and one maximum."""

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
"""Every rank has the same value, or means its own."""
ELEMENTS = "elements"
"""The value is a sum over `weight` elements; those of all ranks count alike."""
ROWS = "rows"
"""The row of one shard: the rows of all shards add up to that of the whole."""


class Total(NamedTuple):
    """One logged value on the host, before it is reduced over ranks and averaged over the micro-batches."""

    key: str
    value: float
    weight: float = 1.0
    how: str = OWN


Shards = list[tuple[Any, Array]]
"""What is asked of a tensor, and the statistics engine's row of the part that this rank holds."""

_LEAST, _MOST = 3, 4
"""The columns of the statistics engine that do not add up: min and max."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """Over whom values are reduced. In a single process, and where no DDP or FSDP2 model is seen, over nobody."""

    everyone: tuple[Any, ...] = ()
    """Process groups of those that see other data: activations are averaged over them, every element alike."""
    shards: tuple[Any, ...] = ()
    """Process groups of those that hold the other parts of the parameters."""
    device: torch.device | None = None

    @classmethod
    def of(cls, model: nn.Module) -> Ranks:
        if not (dist.is_available() and dist.is_initialized()):
            return cls()
        device = next((each.device for each in model.parameters()), torch.device("cpu"))
        for each in model.modules():
            if isinstance(each, nn.parallel.DistributedDataParallel):
                return cls(_shared([each.process_group]), (), device)
        for parameter in model.parameters():
            mesh = getattr(parameter, "device_mesh", None)
            if mesh is not None:
                placements: Sequence[Any] = parameter.placements  # type: ignore[attr-defined]
                parts = [mesh.get_group(at) for at, each in enumerate(placements) if each.is_shard()]
                return cls(_shared(mesh.get_all_groups()), _shared(parts), device)
        return cls()

    def reduced(self, totals: list[Total], rows: Shards, logger: logging.Logger) -> tuple[list[Total], Shards]:
        """The values of all ranks, the same on each. What only some ranks have is left out."""
        kept = [each for each in totals if each.how == OWN]
        alike = [each for each in totals if each.how == ELEMENTS]
        parts = [each for each in totals if each.how not in (OWN, ELEMENTS)]
        if not (self.everyone or parts or rows):
            return totals, rows
        if self.everyone == self.shards:
            whole, rows = self._over(self.everyone, [*alike, *parts], rows, logger)
            return [*kept, *whole], rows
        means, _ = self._over(self.everyone, alike, [], logger)
        whole, rows = self._over(self.shards, parts, rows, logger)
        return [*kept, *means, *whole], rows

    def _over(
        self, groups: Sequence[Any], totals: list[Total], rows: Shards, logger: logging.Logger
    ) -> tuple[list[Total], Shards]:
        for group in groups:
            names = [*(each.key for each in totals), *(str(keys) for keys, _ in rows)]
            common = self._common(names, group)
            if common is not None:
                logger.warning("the ranks have logged different metrics; %d are left out", len(names) - len(common))
                totals, rows = (
                    [each for at, each in enumerate(totals) if at in common],
                    [each for at, each in enumerate(rows, start=len(totals)) if at in common],
                )
        sums = [each for total in totals for each in _summands(total)]
        most = [total.value if total.how == "max" and total.weight else -np.inf for total in totals]
        for _, row in rows:
            sums += np.delete(row, [_LEAST, _MOST]).tolist()
            most += [-row[_LEAST], row[_MOST]]
        sums, most = self._all(sums, groups, "SUM"), self._all(most, groups, "MAX")
        whole = [_whole(total, sums[2 * at], sums[2 * at + 1], most[at]) for at, total in enumerate(totals)]
        first, first_most = 2 * len(totals), len(totals)
        added = []
        for at, (keys, _) in enumerate(rows):
            count, total, squares, zeros, nonfinite = sums[first + 5 * at : first + 5 * at + 5]
            least, greatest = most[first_most + 2 * at : first_most + 2 * at + 2]
            added.append((keys, np.array([count, total, squares, -least, greatest, zeros, nonfinite])))
        return whole, added

    def _all(self, values: list[float], groups: Sequence[Any], how: str) -> list[float]:
        if not values or not groups:
            return values
        packed = torch.tensor(values, dtype=torch.float64, device=self.device)
        for group in groups:
            dist.all_reduce(packed, getattr(dist.ReduceOp, how), group=group)
        found: list[float] = packed.tolist()
        return found

    def _common(self, names: Sequence[str], group: Any) -> set[int] | None:
        """The places of what every rank has logged; None, after one small message, if all have logged the same."""
        mark = float(zlib.crc32("\n".join(names).encode()))
        marks = torch.tensor([mark, -mark], dtype=torch.float64, device=self.device)
        dist.all_reduce(marks, dist.ReduceOp.MAX, group=group)
        if float(marks[0]) == -float(marks[1]):
            return None
        numbered = list(_numbered(names))
        everywhere: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(everywhere, numbered, group=group)
        common = set(everywhere[0]).intersection(*everywhere[1:])
        return {at for at, each in enumerate(numbered) if each in common}


def _shared(groups: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(group for group in groups if dist.get_world_size(group) > 1)


def _numbered(names: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Names with a number that tells the first value of a name from its second."""
    seen: Counter[str] = Counter()
    for name in names:
        yield name, seen[name]
        seen[name] += 1


def _summands(total: Total) -> tuple[float, float]:
    """What is added up over the ranks."""
    if not total.weight:  # an empty shard
        return 0.0, 0.0
    match total.how:
        case "l2":
            return total.value**2, 1.0
        case "mean":
            return total.value * total.weight, total.weight
        case _:
            return total.value, total.weight


def _whole(total: Total, added: float, weight: float, most: float) -> Total:
    """The value of all ranks from what was added up."""
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
