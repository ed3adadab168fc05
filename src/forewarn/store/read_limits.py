"""Limits on reading a database that may be damaged or malicious, in proportion to its size."""

from __future__ import annotations

import os
import sqlite3
import time
from pathlib import Path
from typing import Any

from forewarn.store.errors import RunError

_INSTRUCTIONS = 10_000
"""SQLite instructions between two looks at the clock, a fraction of a millisecond."""
_SECONDS = 0.5
_SECONDS_PER_BYTE = 1e-7
"""CPU time limit of one transaction, a hundred times what reading takes. Waiting for a slow disk does not count."""
_BYTES = 48 << 20
_TIMES_READ = 2
"""One transaction may read `_BYTES` plus this many times the file, which none of our queries does."""


class ReadLimits:
    """Ends a transaction that reads more than the file can hold, as when its pages form a cycle."""

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        path = Path(os.path.realpath(path))
        self._files = (path, path.with_name(f"{path.name}-wal"))
        self.begin(connection)
        connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
        connection.set_progress_handler(self._is_too_long, _INSTRUCTIONS)
        connection.row_factory = self._counted

    def begin(self, connection: sqlite3.Connection) -> None:
        """Reset the limits for a new transaction."""
        size = sum(map(_size_on_disk, self._files))
        self._bytes_left = _BYTES + _TIMES_READ * size
        self._end = time.thread_time() + _SECONDS + _SECONDS_PER_BYTE * size
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, min(self._bytes_left, (1 << 31) - 1))

    def _is_too_long(self) -> bool:
        return time.thread_time() > self._end

    def _counted(self, _: sqlite3.Cursor, row: tuple[Any, ...]) -> tuple[Any, ...]:
        for value in row:
            if isinstance(value, bytes | str):
                self._bytes_left -= len(value)
        if self._bytes_left < 0:
            raise RunError("the database is damaged: more data was read than it can hold")
        return row


def _size_on_disk(path: Path) -> int:
    """The size without the holes of a sparse file, which can be of any length."""
    try:
        status = os.stat(path)
    except OSError:
        return 0
    return min(status.st_size, getattr(status, "st_blocks", 1 << 53) * 512)
