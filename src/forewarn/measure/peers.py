"""The ranks of a run, connected for the monitor alone: a gloo group of its own, for numbers on the host."""

from __future__ import annotations

import datetime
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from forewarn.measure.over_ranks import Array

_TIMEOUT = datetime.timedelta(minutes=30)
"""After this time a message fails. Nobody waits for it but the thread that sends it."""

_SECONDS_TO_EXIT = 5.0
"""How long a process that ends waits for the thread."""

_meetings: dict[str, int] = {}
"""By name, the number of the last meeting that this process has come to."""


class Exit:
    """Keeps the thread that waits for other ranks out of torch while Python exits.

    A thread that returns from torch then aborts the process, and so does a thread of gloo that is the last to hold a
    tensor. A message under way cannot be cancelled. So the thread stays where it is, with all that it holds.
    """

    def __init__(self) -> None:
        self._has_begun = threading.Event()
        self._is_safe = threading.Event()

    def pause(self, seconds: float) -> None:
        """Sleep; once Python exits, for ever."""
        if self._has_begun.wait(seconds):
            self._is_safe.set()
            threading.Event().wait()

    def begin(self, thread: threading.Thread) -> None:
        """Wait until the thread has ended or pauses, but not for long."""
        self._has_begun.set()
        end = time.monotonic() + _SECONDS_TO_EXIT
        while thread.is_alive() and not self._is_safe.wait(0.005) and time.monotonic() < end:
            pass


class Peers:
    """Sends numbers between ranks; every call waits until all ranks have made it.

    Neither the training's process groups nor a device are used. The group is made without `dist.new_group`, which would
    block the training until every rank has called it, and some ranks may not be watched.
    """

    def __init__(self, group: Any, exit: Exit) -> None:
        self._group = group
        self._exit = exit
        self._last_sent: Any = None
        """Gloo may hold the last message a moment longer, and must not be the one that frees it."""
        self.rank: int = group.rank()
        self.num_ranks: int = group.size()

    @classmethod
    def meet(cls, name: str, is_wanted: Callable[[], bool], exit: Exit) -> Peers | None:
        """Connect to all ranks under a name; None if that is no longer wanted before every rank has come.

        Rank 0 calls the meeting, under a new number each time: it may have waited for the others in vain before.
        """
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
        shared = dist.distributed_c10d._get_default_store()
        if hasattr(shared, "clone"):  # a connection of our own, so that the training never waits for ours
            shared = shared.clone()
        store = dist.distributed_c10d.PrefixStore(f"forewarn/{name}", shared)
        number = _called(store, name, rank, is_wanted, exit)
        if number is None:
            return None
        _meetings[name] = number
        here = dist.distributed_c10d.PrefixStore(str(number), store)
        here.add("present", 1)
        if not _happened(lambda: here.add("present", 0) == num_ranks, is_wanted, exit):
            here.add("present", -1)
            if rank == 0:
                store.set("called", "0")
            return None
        return cls(dist.ProcessGroupGloo(here, rank, num_ranks, _TIMEOUT), exit)

    def gather(self, vector: Array) -> Array:
        """The vectors of all ranks, [ranks × values]."""
        gathered = np.empty((self.num_ranks, len(vector)))
        self._gather(gathered, vector)
        return gathered

    def gather_texts(self, text: bytes, lengths: Sequence[int]) -> list[bytes]:
        """The texts of all ranks, whose lengths are known."""
        own = np.zeros(max(1, *lengths), np.uint8)
        own[: len(text)] = np.frombuffer(text, np.uint8)
        gathered = np.empty((self.num_ranks, len(own)), np.uint8)
        self._gather(gathered, own)
        return [row[:length].tobytes() for row, length in zip(gathered, lengths, strict=True)]

    def sums(self, vector: Array) -> Array:
        """The sum over all ranks; the vector is overwritten."""
        return self._reduced(vector, dist.ReduceOp.SUM)

    def maxima(self, vector: Array) -> Array:
        """The largest number of all ranks; the vector is overwritten."""
        return self._reduced(vector, dist.ReduceOp.MAX)

    def _gather(self, gathered: Any, own: Any) -> None:
        tensors = torch.from_numpy(gathered).view(-1), torch.from_numpy(own)
        self._await(self._group._allgather_base(*tensors), *tensors)

    def _reduced(self, vector: Array, operation: Any) -> Array:
        if len(vector):
            options = dist.AllreduceOptions()
            options.reduceOp = operation
            tensor = torch.from_numpy(vector)
            self._await(self._group.allreduce([tensor], options), tensor)
        return vector

    def _await(self, work: Any, *tensors: torch.Tensor) -> None:
        """Wait for a message, and raise what went wrong with it."""
        _happened(work.is_completed, lambda: True, self._exit, longest_pause=0.02)
        self._last_sent = (work, tensors)
        work.wait()


def _called(store: Any, name: str, rank: int, is_wanted: Callable[[], bool], exit: Exit) -> int | None:
    """The number of a new meeting, which rank 0 calls; None if it is no longer wanted before that."""
    before = _meetings.get(name, 0)
    if rank == 0:
        store.set("called", str(before + 1))

    def number() -> int:
        return int(store.get("called")) if store.check(["called"]) else 0

    return number() if _happened(lambda: number() > before, is_wanted, exit) else None


def _happened(event: Callable[[], bool], is_wanted: Callable[[], bool], exit: Exit, longest_pause: float = 0.2) -> bool:
    """Wait for an event as long as it is wanted; returns whether it happened."""
    pause = 1e-5
    while not event():
        if not is_wanted():
            return False
        exit.pause(pause)
        pause = min(1.5 * pause, longest_pause)
    return True


def num_ranks() -> int:
    """Number of ranks that train together; 1 without torch.distributed."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
