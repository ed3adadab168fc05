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

_LONGEST_PAUSE = 0.2
"""Maximum seconds between two looks for ranks that have not come yet."""


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
        """Connect to all ranks under a name; None if that is no longer wanted before every rank has come."""
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
        shared = dist.distributed_c10d._get_default_store()
        if hasattr(shared, "clone"):  # a connection of our own, so that the training never waits for ours
            shared = shared.clone()
        store = dist.distributed_c10d.PrefixStore(f"forewarn/{name}", shared)
        store.add("ranks", 1)
        pause = 0.002
        while store.add("ranks", 0) < num_ranks:
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
            if not is_wanted():
                return None
        return cls(dist.ProcessGroupGloo(store, rank, num_ranks, _TIMEOUT))

    def gather(self, vector: Array) -> Array:
        """The vectors of all ranks, [ranks × values]."""
        gathered = np.empty((self.num_ranks, len(vector)))
        self._group._allgather_base(torch.from_numpy(gathered).view(-1), torch.from_numpy(vector)).wait()
        return gathered

    def gather_texts(self, text: bytes, lengths: Sequence[int]) -> list[bytes]:
        """The texts of all ranks, whose lengths are known."""
        own = np.zeros(max(lengths), np.uint8)
        own[: len(text)] = np.frombuffer(text, np.uint8)
        gathered = np.empty((self.num_ranks, len(own)), np.uint8)
        self._group._allgather_base(torch.from_numpy(gathered).view(-1), torch.from_numpy(own)).wait()
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
            self._group.allreduce([torch.from_numpy(vector)], options).wait()
        return vector


def num_ranks() -> int:
    """Number of ranks that train together; 1 without torch.distributed."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
