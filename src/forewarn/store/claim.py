"""A run directory belongs to the live process that holds its lock. The system frees the lock when the process ends."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

if sys.platform != "win32":
    import fcntl


class Claim:
    """The lock on a run directory, held while the run is written. It creates no file."""

    def __init__(self) -> None:
        self._descriptor: int | None = None
        self.is_contested = False
        """Whether another writer held it at the last try."""

    def take(self, directory: Path) -> None:
        """Raises BlockingIOError if another writer has taken it. Does nothing where directories cannot be locked."""
        if sys.platform == "win32" or self._descriptor is not None:
            return
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            self.is_contested = isinstance(error, BlockingIOError)
            if self.is_contested:
                raise
        else:
            self.is_contested = False
            self._descriptor = descriptor

    def release(self) -> None:
        """Free the directory, even if a forked child has inherited the lock."""
        descriptor, self._descriptor = self._descriptor, None
        if sys.platform != "win32" and descriptor is not None:
            with suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)


def numbered(path: Path) -> Iterator[Path]:
    """`exp1`, `exp1-2`, `exp1-3`, …"""
    yield path
    named = path if path.name not in ("", "..") else path.resolve()  # "." and ".." have no name
    yield from (named.with_name(f"{named.name}-{number}") for number in itertools.count(2))


def new_directory(path: Path) -> Path:
    """Create the first of `exp1`, `exp1-2`, … that does not exist; no two processes ever get the same one.

    If a directory cannot be created, its path is still returned. Writing to it then reports the reason.
    """
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
    return next(candidate for candidate in numbered(path) if _is_made(candidate))


def _is_made(path: Path) -> bool:
    try:
        path.mkdir()
    except FileExistsError:
        return False
    except OSError:
        return True
    return True
