"""The ranks of a run, connected for the monitor alone: a gloo group of its own, for numbers on the host."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from forewarn.measure.over_ranks import Array

_TIMEOUT = datetime.timedelta(minutes=30)
"""After this time a message fails. Nobody waits for it but the thread that sends it."""

_meetings: dict[str, int] = {}
"""By name, the number of the last meeting that this process has come to."""


class Peers:
    """Sends numbers between ranks; every call waits until all ranks have made it.

    Neither the training's process groups nor a device are used. The group is made without `dist.new_group`, which would
    block the training until every rank has called it, and some ranks may not be watched.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self.rank: int = group.rank()
        self.num_ranks: int = group.size()

    @classmethod
    def meet(cls, name: str, is_wanted: Callable[[], bool]) -> Peers | None:
        """Connect to all ranks under a name; None if that is no longer wanted before every rank has come.

        Rank 0 calls the meeting, under a new number each time: it may have waited for the others in vain before.
        """
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
        shared = dist.distributed_c10d._get_default_store()
        if hasattr(shared, "clone"):  # a connection of our own, so that the training never waits for ours
            shared = shared.clone()
        store = dist.distributed_c10d.PrefixStore(f"forewarn/{name}", shared)
        number = _called(store, name, rank, is_wanted)
        if number is None:
            return None
        _meetings[name] = number
        here = dist.distributed_c10d.PrefixStore(str(number), store)
        here.add("present", 1)
        if not _happened(lambda: here.add("present", 0) == num_ranks, is_wanted):
            here.add("present", -1)
            if rank == 0:
                store.set("called", "0")
            return None
        return cls(dist.ProcessGroupGloo(here, rank, num_ranks, _TIMEOUT))

    def gather(self, vector: Array) -> Array:
        """The vectors of all ranks, [ranks × values]."""
        gathered = np.empty((self.num_ranks, len(vector)))
        _await(self._group._allgather_base(torch.from_numpy(gathered).view(-1), torch.from_numpy(vector)))
        return gathered

    def gather_texts(self, text: bytes, lengths: Sequence[int]) -> list[bytes]:
        """The texts of all ranks, whose lengths are known."""
        own = np.zeros(max(lengths), np.uint8)
        own[: len(text)] = np.frombuffer(text, np.uint8)
        gathered = np.empty((self.num_ranks, len(own)), np.uint8)
        _await(self._group._allgather_base(torch.from_numpy(gathered).view(-1), torch.from_numpy(own)))
        return [row[:length].tobytes() for row, length in zip(gathered, lengths, strict=True)]

    def sums(self, vector: Array) -> Array:
        """The sum over all ranks; the vector is overwritten."""
        return self._reduced(vector, dist.ReduceOp.SUM)

    def maxima(self, vector: Array) -> Array:
        """The largest number of all ranks; the vector is overwritten."""
        return self._reduced(vector, dist.ReduceOp.MAX)

    def _reduced(self, vector: Array, operation: Any) -> Array:
        if len(vector):
            options = dist.AllreduceOptions()
            options.reduceOp = operation
            _await(self._group.allreduce([torch.from_numpy(vector)], options))
        return vector


def _called(store: Any, name: str, rank: int, is_wanted: Callable[[], bool]) -> int | None:
    """The number of a new meeting, which rank 0 calls; None if it is no longer wanted before that."""
    before = _meetings.get(name, 0)
    if rank == 0:
        store.set("called", str(before + 1))

    def number() -> int:
        return int(store.get("called")) if store.check(["called"]) else 0

    return number() if _happened(lambda: number() > before, is_wanted) else None


def _await(work: Any) -> None:
    """Wait for a message, and raise what went wrong with it."""
    _happened(work.is_completed, lambda: True, longest_pause=0.02)
    work.wait()


def _happened(event: Callable[[], bool], is_wanted: Callable[[], bool], longest_pause: float = 0.2) -> bool:
    """Wait for an event as long as it is wanted; returns whether it happened.

    The thread sleeps in Python, not inside torch: if Python exited meanwhile, a return from torch would abort it.
    """
    pause = 1e-5
    while not event():
        if not is_wanted():
            return False
        time.sleep(pause)
        pause = min(1.5 * pause, longest_pause)
    return True


def num_ranks() -> int:
    """Number of ranks that train together; 1 without torch.distributed."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
