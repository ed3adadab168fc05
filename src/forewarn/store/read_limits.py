"""Limits on reading a database that may be damaged or made to harm: no more time and memory than its size explains."""

from __future__ import annotations

import os
import sqlite3
import time
from pathlib import Path
from typing import Any

from forewarn.store.errors import RunError

_INSTRUCTIONS = 10_000
"""Of SQLite's machine between two looks at the clock: a fraction of a millisecond."""
_SECONDS = 0.5
_SECONDS_PER_BYTE = 1e-7
"""CPU time of one transaction, a hundred times what reading takes; a slow disk is waited for without limit."""
_BYTES = 48 << 20
_TIMES_READ = 2
"""What one transaction may read: the file so many times, which no query of ours does, and this in any case."""


class ReadLimits:
    """Ends a transaction that reads more than a file of this size can hold, as pages that lead in circles do."""

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        path = Path(os.path.realpath(path))
        self._files = (path, path.with_name(f"{path.name}-wal"))
        self.begin(connection)
        connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
        connection.set_progress_handler(self._is_too_long, _INSTRUCTIONS)
        connection.row_factory = self._counted

    def begin(self, connection: sqlite3.Connection) -> None:
        """Start counting anew, for a new transaction."""
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
            raise RunError("more is read from it than it can hold: the database is damaged")
        return row


def _size_on_disk(path: Path) -> int:
    """Without the holes of a sparse file, which can be as long as you like."""
    try:
        status = os.stat(path)
    except OSError:
        return 0
    return min(status.st_size, getattr(status, "st_blocks", 1 << 53) * 512)
