"""Torch operations and memory of a step, counted in separate passes that are not timed."""

from __future__ import annotations

import contextlib
import gc
import tracemalloc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from forewarn.lab.bench.contender import WARM_UP_STEPS, Contender, Loop, Turn
from forewarn.lab.bench.workloads import Workload

SYNCS = {"_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "_unique2", "masked_select"}
"""Operations that wait for an accelerator. `.cpu()` and `.numpy()` do too, but dispatch nothing on a CPU."""


class Operations(TorchDispatchMode):
    """Counts the operations that are dispatched while it is active."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0
        self.syncs = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        self.syncs += func._schema.name.removeprefix("aten::") in SYNCS
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True, slots=True)
class Counted:
    """Counts per step of a real run, including those of the bare loop."""

    operations: float
    syncs: float


def operations(workload: Workload, contender: Contender, turn: Turn) -> Counted:
    """Operations and syncs per step, rare steps weighted by how often they occur."""
    counts: list[int] = []
    syncs: list[int] = []
    with Loop(workload, contender, turn) as loop:
        for _ in range(turn.num_steps):
            loop.fetch()
            with Operations() as step:
                loop.step()
            counts.append(step.count)
            syncs.append(step.syncs)
    weights = turn.weights(contender.period)
    return Counted(weighted(counts[WARM_UP_STEPS:], weights), weighted(syncs[WARM_UP_STEPS:], weights))


def held_bytes(workload: Workload, contender: Contender, turn: Turn) -> int:
    """Bytes held at the end of a turn by tensors, and by Python and numpy.

    Tensors are those that the garbage collector tracks, each storage counted once; the rest is what tracemalloc has
    recorded since the contender was attached. Libraries with their own allocators are not seen.
    """
    gc.collect()
    before = _tensor_bytes()
    with _traced(), Loop(workload, contender, turn) as loop:
        for _ in range(turn.num_steps):
            loop.fetch()
            loop.step()
        gc.collect()
        return tracemalloc.get_traced_memory()[0] + _tensor_bytes() - before


@contextlib.contextmanager
def _traced() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()


def weighted(values: Sequence[float], weights: Sequence[float]) -> float:
    """The weighted mean over the timed steps."""
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)


def _tensor_bytes() -> int:
    """Bytes of every strided tensor in memory, each storage once."""
    sizes: dict[int, int] = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), Tensor) and thing.layout is torch.strided and thing.device.type != "meta":
            storage = thing.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())
