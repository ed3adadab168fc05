"""Notices the end of other processes on this machine, at no cost while they run."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

_MOST = 64
"""Maximum number of processes watched."""

_SECONDS_TO_CLOSE = 1.0


def machine() -> str:
    """What processes have in common if they can watch each other; empty where that is not possible: outside Linux."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}" if hasattr(os, "pidfd_open") else ""
    except OSError:
        return ""


class Neighbors:
    """Calls `ended(ranks)` from a thread as soon as processes have ended, whatever ended them."""

    def __init__(self, processes: Mapping[int, int], ended: Callable[[Sequence[int]], None]) -> None:
        """`processes` are process ids by rank."""
        self._ended = ended
        self._ranks: dict[int, int] = {}
        self._stop, self._stopped = os.pipe()
        for rank, process in list(processes.items())[:_MOST]:
            try:
                self._ranks[os.pidfd_open(process)] = rank
            except ProcessLookupError:
                ended([rank])
            except OSError:  # not permitted, or too many open files
                break
        self._thread = threading.Thread(target=self._run, name="forewarn neighbors", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop, after a last look: the end of another process may be why this one ends."""
        with suppress(OSError):
            os.write(self._stopped, b" ")  # a forked process may keep the pipe open
            os.close(self._stopped)
        self._thread.join(_SECONDS_TO_CLOSE)

    def _run(self) -> None:
        poll = select.poll()
        for descriptor in (self._stop, *self._ranks):
            poll.register(descriptor, select.POLLIN)
        while self._ranks:
            ready = {descriptor for descriptor, _ in poll.poll()}
            if gone := ready - {self._stop}:
                self._ended([self._ranks.pop(descriptor) for descriptor in gone])
            for descriptor in gone:
                poll.unregister(descriptor)
                os.close(descriptor)
            if self._stop in ready:
                break
        for descriptor in (self._stop, *self._ranks):
            os.close(descriptor)
