"""Writing a run: readings are on disk within a second, and the training loop never waits for the disk."""

from __future__ import annotations

import os
import sqlite3
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from forewarn.store import database, manifest
from forewarn.store.background import INSERT_EVENT, INSERT_ROW, BackgroundWriter, Item
from forewarn.store.blobs import bands
from forewarn.store.chunks import FLOATS
from forewarn.store.columns import TIMES
from forewarn.store.errors import RunError
from forewarn.store.histogram_table import INSERT_DISTRIBUTION
from forewarn.store.interning import Interning
from forewarn.store.manifest import Manifest, read_manifest, write_manifest
from forewarn.store.mounts import network_file_system
from forewarn.store.plain import encoded, storable
from forewarn.store.records import Record, to_text
from forewarn.store.truncation import truncate
from forewarn.types import Action, Alert, Block, Distribution, Finding, RunInfo, Values

_INSERT_RECORD = "INSERT INTO records (time, step, kind, body) VALUES (?, ?, ?, ?)"
_MOST_STEPS = 1 << 63
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


class RunWriter:
    """Records a run in a directory: `run.json` for fixed facts, `run.db` for readings and events.

    `append` copies the values and returns; a thread writes them twice a second. A disk that is full or cannot be
    written never raises here: `failure` says what is wrong, and the run goes on unrecorded.
    After a fork only the process that made the writer writes.
    """

    def __init__(
        self, path: str | Path, *, info: RunInfo, config: Mapping[str, Any], resume_at: int | None = None
    ) -> None:
        """Begin a new run, or with `resume_at` go on with the one that is there, without anything from that step on.

        A path that holds a run is refused with FileExistsError unless it is resumed, a path that is a file with
        NotADirectoryError, and a run that is to be resumed but is missing or damaged with RunError.
        """
        self.path = Path(path)
        self.journal = "WAL"
        self._failure: str | None = None
        self._background: BackgroundWriter | None = None
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._interning = Interning()
        self._num_rows = 0
        if os.path.exists(self.path) and not os.path.isdir(self.path):  # unlike Path's these never raise
            raise NotADirectoryError(f"{self.path} is a file; a run needs a directory, so name another path with run=")
        try:
            if resume_at is None:
                self._create(Manifest(info, config, self.journal))
            else:
                self._resume(Manifest(info, config, self.journal), resume_at)
        except FileExistsError as error:
            if not os.path.exists(self.path / manifest.NAME):
                raise FileExistsError(
                    f"{self.path} holds a {database.NAME} without its {manifest.NAME}; remove it if it is of no use, or"
                    " name another path with run="
                ) from error
            raise FileExistsError(
                f"{self.path} already holds a run; go on with it by resume=True, or name another path with run="
            ) from error
        except (OSError, sqlite3.Error) as error:
            if getattr(error, "sqlite_errorcode", 0) & 0xFF in _DAMAGED:
                raise RunError(f"{self.path} cannot be resumed: {database.NAME} is damaged ({error})") from error
            self._failure = f"{self.path} cannot be written ({error}): this run is not recorded"

    @property
    def failure(self) -> str | None:
        """Why the run is not being recorded right now, in one sentence; None if it is."""
        return self._failure or (self._background.failure if self._background is not None else None)

    def append(self, step: int, blocks: Sequence[Block], distributions: Sequence[Distribution] = ()) -> None:
        """Record the blocks of one step, in order, and its histograms: some tens of microseconds for 2,000 values.

        A step may be appended to again, also later.
        """
        background = self._ready()
        if background is None:
            return
        if not -_MOST_STEPS <= step < _MOST_STEPS:
            raise ValueError(f"step {step} is out of range; a 64-bit number is expected")
        for block in blocks:
            if block.step != step or block.values.size != len(block.scopes):
                raise ValueError(
                    f"{block.name} of step {block.step} has {block.values.size} values for {len(block.scopes)} scopes;"
                    f" blocks of step {step} with one value for each scope are expected"
                )
        banded = [(distribution, list(bands(distribution))) for distribution in distributions]
        if background.full:
            background.drop()
            return
        times = [block.time for block in blocks]
        shared = not blocks or times.count(times[0]) == len(times)
        body = _joined([block.values for block in blocks])
        packed = np.array(times[:1] if shared else times, TIMES).tobytes()
        with self._lock:
            layouts = tuple([self._interning.layout(block.name, block.scopes) for block in blocks])
            pattern = self._interning.pattern(shared, layouts)
            rows: list[Item] = [(INSERT_ROW, (self._num_rows, int(step), pattern, packed, body))]
            num_bytes = len(body)
            for distribution, its_bands in banded:
                scopes = self._interning.scopes(distribution.scopes)
                columns = int(step), distribution.time, storable(distribution.name), scopes
                rows += [(INSERT_DISTRIBUTION, (*columns, *band)) for band in its_bands]
                num_bytes += sum(counts.nbytes for *_, counts in its_bands)
            background.put([*self._interning.news(), *rows], num_bytes)
            self._num_rows += 1

    def record(
        self,
        step: int,
        *,
        findings: Sequence[Finding] = (),
        alerts: Sequence[Alert] = (),
        actions: Sequence[Action] = (),
    ) -> None:
        """Record the findings of a step, the alerts that changed, and the actions taken."""
        for kind, records in (("finding", findings), ("alert", alerts), ("action", actions)):
            for record in records:
                self._record(int(step), kind, record)

    def event(self, kind: str, /, **data: str | float) -> None:
        """Record something that happened to the run itself, now."""
        background = self._ready()
        if background is not None and not background.full:
            text = encoded(data)
            background.put([(INSERT_EVENT, (time.time(), storable(kind), text))], len(text))

    def flush(self) -> None:
        """Wait until everything is on disk, or `failure` says why it is not."""
        background = self._ready()
        if background is not None:
            background.flush()

    def close(self, reason: str = "completed") -> None:
        """Record the end of the run and leave one tidy file. Closing again does nothing."""
        background = self._ready()
        if background is not None:
            _finish(background, reason)
            self._finalizer.detach()  # only now: an interrupt in between must not lose what is queued

    def _ready(self) -> BackgroundWriter | None:
        """The background writer; None without a directory, after closing and in a forked child."""
        if self._background is None or os.getpid() != self._process or not self._finalizer.alive:
            return None
        return self._background

    def _record(self, step: int, kind: str, record: Record) -> None:
        background = self._ready()
        if background is not None and not background.full:
            text = to_text(record)
            background.put([(_INSERT_RECORD, (time.time(), step, kind, text))], len(text))

    def _create(self, description: Manifest) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        if (self.path / manifest.NAME).exists():
            raise FileExistsError(self.path / manifest.NAME)
        self.journal = _journal_for(self.path)
        file = self.path / database.NAME
        database.create_database(file, self.journal, database.page_bytes_for(len(description.info.parameters)))
        try:
            write_manifest(self.path, replace(description, journal=self.journal))
        except OSError:
            database.delete_database(file)
            raise
        self._start(generation=0)

    def _resume(self, description: Manifest, step: int) -> None:
        file = self.path / database.NAME
        if not (self.path / manifest.NAME).exists() or not file.exists():
            raise RunError(f"{self.path} holds no run to resume; begin one by leaving resume out, or name another path")
        started = read_manifest(self.path).info.started
        self.journal = _journal_for(self.path)
        connection = database.open_for_writing(file, self.journal)
        try:
            database.upgrade(connection)
            truncate(connection, step, time.time())
            self._num_rows = database.num_rows(connection)
            generation = database.generation_of(connection)
            self._interning.load(connection)
        except RunError as error:
            raise RunError(f"{self.path} cannot be resumed: {error}") from error
        finally:
            connection.close()
        info = replace(description.info, started=started or description.info.started)
        write_manifest(self.path, replace(description, info=info, journal=self.journal))
        self._start(generation)

    def _start(self, generation: int) -> None:
        self._background = BackgroundWriter(self.path / database.NAME, self.journal, generation)
        # Not only at the end of the process: a writer that nobody holds any more is closed as well.
        self._finalizer = weakref.finalize(self, _finish, self._background, "not closed")


def _joined(values: Sequence[Values]) -> memoryview:
    """The bytes of many arrays in a row: one copy on the training thread, which SQLite reads in place."""
    if not values:
        return memoryview(b"")
    joined = np.concatenate(values, axis=None, dtype=FLOATS, casting="unsafe")
    return joined.view(np.uint8).data


def _finish(background: BackgroundWriter, reason: str) -> None:
    background.stop([(INSERT_EVENT, (time.time(), "end", encoded({"reason": reason})))])


def _journal_for(path: Path) -> str:
    return "WAL" if network_file_system(path) is None else "TRUNCATE"
