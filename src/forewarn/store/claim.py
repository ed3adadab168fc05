"""A run directory belongs to one live process: the one that holds its lock, which the system frees when it ends."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

if sys.platform != "win32":
    import fcntl


class Claim:
    """The lock on a run directory, held while the run is written. No file is made for it."""

    def __init__(self) -> None:
        self._descriptor: int | None = None

    def take(self, directory: Path) -> None:
        """Raises BlockingIOError if another writer has taken it. Where directories have no locks, nobody ever has."""
        if sys.platform == "win32" or self._descriptor is not None:
            return
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            if isinstance(error, BlockingIOError):
                raise
        else:
            self._descriptor = descriptor

    def release(self) -> None:
        """Free the directory, also where a forked child has inherited the lock."""
        descriptor, self._descriptor = self._descriptor, None
        if sys.platform != "win32" and descriptor is not None:
            with suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)
