"""The writer thread. It gets finished rows in batches, so SQLite does the work and training keeps the GIL."""

from __future__ import annotations

import errno
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from forewarn.store.catalog import Catalog
from forewarn.store.compaction import TAIL_BYTES, TAIL_ROWS, compact
from forewarn.store.database import generation_of, open_for_writing, transaction
from forewarn.store.merging import merges
from forewarn.store.plain import encoded
from forewarn.store.records import INSERT_EVENT
from forewarn.store.run_summary import SummaryKeeper
from forewarn.store.tail import INSERT_ROW

_PAUSE_SECONDS = 0.9
"""Longest time that a row waits. A killed process loses at most this much."""
_RETRY_SECONDS = 5.0
_HURRY_BYTES = 4 << 20
_ITEM_BYTES = 256
"""Bytes of a queued item apart from its values."""
_MOST_BYTES = 64 << 20
"""Maximum bytes held in memory while the disk is slow or full; further rows are dropped."""
_STOP_SECONDS = 60.0
_RUN_INODES = 5
"""A directory, run.json, run.db, and SQLite's log with its index."""

Item = tuple[str, Sequence[Any]]


class SupersededError(Exception):
    """Another process has begun or resumed the run, so this one must not write to it."""


_SUPERSEDED = SupersededError, FileExistsError, BlockingIOError


@dataclass(frozen=True, slots=True)
class Beginning:
    """A database that is ready for writing."""

    journal: str
    generation: int
    waiting: Sequence[Item] = ()
    """Statements of rows that arrived before the database was ready."""


Begin = Callable[[], Beginning]


class BackgroundWriter:
    """Executes statements from the training thread, in order and in batches.

    If a write fails, `failure` says why. Rows are kept up to a limit, and the thread tries again. The same holds at the
    start: if `beginning` is an exception, the first call of `begin` failed, and the thread calls it again.
    """

    def __init__(
        self,
        database: Path,
        begin: Begin,
        beginning: Beginning | Exception,
        settle: Callable[[Callable[[Sequence[Item], int], None]], None],
    ) -> None:
        """`settle` passes rows that were taken but not queued yet to its argument, in this or the training thread."""
        self.failure: str | None = None
        self._database = database
        self._begin = begin
        self._settle = settle
        self._beginning = None if isinstance(beginning, Exception) else beginning
        self._catalog = Catalog()
        self._summary: SummaryKeeper | None = None
        self._lock = threading.RLock()
        """For the training thread. Unlike a condition it is acquired in one step, so no interrupt leaves it locked."""
        self._changed = threading.Condition(self._lock)
        self._items: list[Item] = []
        self._batch: list[Item] = []
        self._num_bytes = 0
        self._num_put = 0
        self._num_written = 0
        self._num_dropped = 0
        self._tail_rows = 0
        self._tail_bytes = 0
        self._urgent = False
        self._stopping = False
        self._superseded = False
        if isinstance(beginning, Exception):
            self.failure = self._sentence(beginning)
        self.process = os.getpid()
        self._thread = threading.Thread(target=self._work, name="forewarn-store", daemon=True)
        self._thread.start()

    @property
    def journal(self) -> str | None:
        """The journal mode of SQLite; None while there is no database."""
        return None if self._beginning is None else self._beginning.journal

    @property
    def full(self) -> bool:
        """Whether the queue is full; count rows that do not fit with `drop`."""
        return self._num_bytes >= _MOST_BYTES or self._superseded

    def put(self, items: Sequence[Item], num_bytes: int = 0) -> None:
        """Queue statements that belong together; `num_bytes` is the size of their values and text."""
        with self._lock:
            self._items += items
            self._num_put += len(items)
            self._num_bytes += num_bytes + len(items) * _ITEM_BYTES
            if self._num_bytes >= _HURRY_BYTES and not self._urgent and self.failure is None:
                self._urgent = True
                self._changed.notify_all()

    def drop(self) -> None:
        """Count a row that did not fit, and report the failure."""
        with self._lock:
            self._num_dropped += 1
            if self.failure is None:
                self.failure = f"the disk of {self._database.parent} is too slow: some steps are not recorded"

    def flush(self) -> None:
        """Wait until all queued rows are on disk or writing has failed."""
        if os.getpid() != self.process:
            return
        self._settle(self.put)
        with self._changed:
            target = self._num_put
            while self._num_written < target and self.failure is None and self._thread.is_alive():
                self._urgent = True
                self._changed.notify_all()
                self._changed.wait(_PAUSE_SECONDS)

    def stop(self, last: Sequence[Item]) -> None:
        """Write the remaining rows and `last`, compact them, and end the thread. Give up after a minute.

        Called again after an interrupt, it waits again.
        """
        if os.getpid() != self.process:
            return
        self._settle(self.put)
        with self._changed:
            if not self._stopping:
                self.put(last)
            self._stopping = self._urgent = True
            self._changed.notify_all()
        if threading.current_thread() is self._thread:  # the garbage collector ran in this thread
            return
        self._thread.join(_STOP_SECONDS)
        if self._thread.is_alive():
            self.failure = f"writing to {self._database} took over {_STOP_SECONDS:.0f} s at the end; forewarn gave up"

    def _work(self) -> None:
        # The connection lives only in this frame, so a forked child cannot close it and undo the parent's work.
        connection: sqlite3.Connection | None = None
        stopping = False
        while not (stopping or self._superseded):
            stopping = self._wait()
            try:
                self._settle(self.put)  # also if it cannot be opened: the queue has a limit
                connection = connection or self._opened()
                self._write(connection)
                self._tidy(connection, all_of_it=stopping)
                self._recover(connection)
                if self._summary is not None:
                    self._summary.write()
            except Exception as error:  # training must go on, whatever the error
                self._fail(error)
                if connection is not None:
                    with suppress(sqlite3.Error):
                        connection.close()
                connection = None
        if connection is not None:
            _leave(connection)
            if self._summary is not None:
                self._summary.write()

    def _wait(self) -> bool:
        """Sleep until there is something to do; True if the writer is stopping."""
        with self._changed:
            pause = _PAUSE_SECONDS if self.failure is None else _RETRY_SECONDS
            self._changed.wait_for(lambda: self._urgent, pause)
            self._urgent = False
            return self._stopping

    def _opened(self) -> sqlite3.Connection:
        if self._beginning is None:
            self._beginning = self._begin()
            self.put(self._beginning.waiting)
        connection = open_for_writing(self._database, self._beginning.journal)
        self._measure_tail(connection)
        self._summary = SummaryKeeper(self._database.parent)
        return connection

    def _measure_tail(self, connection: sqlite3.Connection) -> None:
        self._tail_rows, self._tail_bytes = connection.execute(
            "SELECT count(*), coalesce(sum(length(body)), 0) FROM tail"
        ).fetchone()

    def _write(self, connection: sqlite3.Connection) -> None:
        self._settle(self.put)
        with self._changed:
            self._batch += self._items
            self._items = []
            num_bytes = self._num_bytes
        if not self._batch:
            return
        if not self._database.exists():  # SQLite would keep writing into the deleted file
            raise FileNotFoundError("the database was removed")
        with transaction(connection):
            if self._beginning is None or generation_of(connection) != self._beginning.generation:
                raise SupersededError
            for statement, items in groupby(self._batch, itemgetter(0)):
                connection.executemany(statement, [parameters for _, parameters in items])
        for statement, parameters in self._batch:
            if statement is INSERT_ROW:
                self._tail_rows += 1
                self._tail_bytes += len(parameters[-1])
        if self._summary is not None:
            self._summary.take(connection, self._batch)
            self._summary.write()  # before the rows count as written, so that a flush waits for it
        with self._changed:
            self._num_written += len(self._batch)
            self._batch = []
            self._num_bytes -= num_bytes
            self._changed.notify_all()

    def _tidy(self, connection: sqlite3.Connection, all_of_it: bool) -> None:
        """Compact and merge what is due. New rows are written in between, so none waits long."""
        compacted = False
        while self._tail_rows >= TAIL_ROWS or self._tail_bytes >= TAIL_BYTES or (all_of_it and self._tail_rows):
            compacted = compact(connection, self._catalog)
            self._measure_tail(connection)
        if compacted:
            written = time.monotonic()
            for _ in merges(connection, self._catalog):
                if time.monotonic() - written > _PAUSE_SECONDS:
                    self._write(connection)
                    written = time.monotonic()

    def _recover(self, connection: sqlite3.Connection) -> None:
        """After a failure, record how many rows are missing."""
        with self._changed:
            if self.failure is None:
                return
            data = encoded({"why": self.failure, "dropped_rows": self._num_dropped})
            self._num_dropped = 0
            self.failure = None
        connection.execute(INSERT_EVENT, (time.time(), "store_recovered", data))

    def _fail(self, error: Exception) -> None:
        with self._changed:
            self.failure = self._sentence(error)
            if isinstance(error, _SUPERSEDED):
                self._superseded = True
                self._items, self._batch = [], []
            self._changed.notify_all()

    def _sentence(self, error: Exception) -> str:
        """What happened, and until when nothing is recorded."""
        directory = self._database.parent
        what = "this run is not recorded" if self._beginning is None else "nothing is recorded"
        if isinstance(error, _SUPERSEDED):
            return f"the run in {directory} was begun or resumed by another process: this process records nothing more"
        reason = getattr(error, "sqlite_errorcode", 0) & 0xFF
        has_no_room = reason == sqlite3.SQLITE_CANTOPEN or getattr(error, "errno", None) == errno.ENOSPC
        if has_no_room and _is_out_of_inodes(directory):
            return f"the disk of {directory} is out of inodes (df -i): {what} until files are deleted there"
        if reason == sqlite3.SQLITE_FULL:
            return f"the disk of {directory} is full: {what} until there is room"
        if getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE):
            return f"{directory} cannot be written (too many open files, see ulimit -n): {what} until some are closed"
        return f"{directory} cannot be written ({error}): {what} until it can"


def _leave(connection: sqlite3.Connection) -> None:
    """Make the database a single file again, unless someone is reading it.

    With a journal in memory, a process that is killed meanwhile leaves none behind, which would have to be undone.
    """
    with suppress(sqlite3.Error):
        connection.execute("PRAGMA busy_timeout = 0")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        connection.execute("PRAGMA journal_mode = MEMORY").fetchall()
    connection.close()


def _is_out_of_inodes(directory: Path) -> bool:
    """Whether the file system has no inodes left for a run; SQLite only says that it cannot open a file."""
    try:
        directory = directory.absolute()
        status = os.statvfs(next(path for path in (directory, *directory.parents) if os.path.exists(path)))
    except (AttributeError, OSError):  # Windows, or a directory deleted meanwhile
        return False
    return 0 <= status.f_favail < _RUN_INODES < status.f_files
