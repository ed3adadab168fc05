"""The ranks of a run, connected for the monitor alone: a gloo group of its own, for numbers on the host."""

from __future__ import annotations

import datetime
import threading
import time
from collections.abc import Callable, Mapping, Sequence
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

Accepts = Callable[[Sequence[bytes]], bool]


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

    def happened(self, event: Callable[[], bool], is_wanted: Callable[[], bool], longest_pause: float = 0.2) -> bool:
        """Wait for an event as long as it is wanted; returns whether it happened."""
        pause = 1e-5
        while not event():
            if not is_wanted():
                return False
            self.pause(pause)
            pause = min(1.5 * pause, longest_pause)
        return True

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

    def __init__(self, store: Any, rank: int, num_ranks: int, exit: Exit) -> None:
        self._store = store
        self._group: Any = dist.ProcessGroupGloo(store, rank, num_ranks, _TIMEOUT)
        self._exit = exit
        self._last_sent: Any = None
        """Gloo may hold the last message a moment longer, and must not be the one that frees it."""
        self.rank, self.num_ranks = rank, num_ranks

    @classmethod
    def meet(
        cls, names: Mapping[str, Accepts], text: bytes, is_wanted: Callable[[], bool], exit: Exit
    ) -> tuple[Peers, list[bytes]] | None:
        """Connect to all ranks under the first of several names under which all of them have come.

        Each rank brings a text, and gets those of all. For every name, `Accepts` says whether these ranks belong
        together. None if that is no longer wanted before every rank has come.
        """
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
        shared = dist.distributed_c10d._get_default_store()
        if hasattr(shared, "clone"):  # a connection of our own, so that the training never waits for ours
            shared = shared.clone()
        meetings = [_Meeting(shared, name, accepts, rank, num_ranks, text) for name, accepts in names.items()]
        if not exit.happened(lambda: any(meeting.is_complete() for meeting in meetings), is_wanted):
            for meeting in meetings:
                meeting.leave()
            return None
        met = next(meeting for meeting in meetings if meeting.texts)
        return cls(met.here, rank, num_ranks, exit), met.texts

    def among(self, ranks: Sequence[int], name: str) -> Peers:
        """A connection of some of these ranks only, made by all of those."""
        store = dist.distributed_c10d.PrefixStore(name, self._store)
        return Peers(store, ranks.index(self.rank), len(ranks), self._exit)

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

    def all_texts(self, text: bytes) -> list[bytes]:
        """The texts of all ranks."""
        lengths = self.gather(np.array([float(len(text))]))[:, 0]
        return self.gather_texts(text, [int(length) for length in lengths])

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
        self._exit.happened(work.is_completed, lambda: True, longest_pause=0.02)
        self._last_sent = (work, tensors)
        work.wait()


class _Meeting:
    """A name under which ranks come together.

    Rank 0 calls the meeting, under a new number each time: it may have waited for the others in vain before.
    """

    def __init__(self, shared: Any, name: str, accepts: Accepts, rank: int, num_ranks: int, text: bytes) -> None:
        self._name, self._accepts, self._rank, self._num_ranks, self._text = name, accepts, rank, num_ranks, text
        self._store = dist.distributed_c10d.PrefixStore(f"forewarn/{name}", shared)
        self._before = _meetings.get(name, 0)
        self.here: Any = None
        """Where those who have come to this meeting find each other."""
        self.texts: list[bytes] = []
        """What all ranks have brought, once they have come and belong together."""
        self._is_over = False
        if rank == 0:
            self._store.set("called", str(self._before + 1))

    def is_complete(self) -> bool:
        """Whether all ranks have come and belong together."""
        if self.here is None:
            number = int(self._store.get("called")) if self._store.check(["called"]) else 0
            if number <= self._before:
                return False
            _meetings[self._name] = number
            self.here = dist.distributed_c10d.PrefixStore(str(number), self._store)
            self.here.set(f"text {self._rank}", self._text)
            self.here.add("present", 1)
        if not self._is_over and self.here.add("present", 0) == self._num_ranks:
            texts = [self.here.get(f"text {rank}") for rank in range(self._num_ranks)]
            self._is_over = True
            self.texts = texts if self._accepts(texts) else []
        return bool(self.texts)

    def leave(self) -> None:
        if self.here is not None:
            self.here.add("present", -1)
            if self._rank == 0:
                self._store.set("called", "0")


def num_ranks() -> int:
    """Number of ranks that train together; 1 without torch.distributed."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
