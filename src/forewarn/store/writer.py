"""Writing a run: readings are on disk within a second, and the training loop never waits for the disk."""

from __future__ import annotations

import os
import sqlite3
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from forewarn.rows import Row as RowOfNumbers
from forewarn.rows import Sheet
from forewarn.store import database, manifest
from forewarn.store.background import BackgroundWriter, Begin, Beginning, SupersededError
from forewarn.store.blobs import bands
from forewarn.store.chunks import FLOATS
from forewarn.store.claim import Claim
from forewarn.store.columns import TIMES
from forewarn.store.errors import RunError, RunExistsError
from forewarn.store.interning import Interning
from forewarn.store.manifest import Manifest, read_manifest, write_manifest
from forewarn.store.mounts import network_file_system
from forewarn.store.numbering import Numbering, Row
from forewarn.store.plain import encoded, storable
from forewarn.store.records import INSERT_EVENT, INSERT_RECORD, Record, to_text
from forewarn.store.truncation import truncate
from forewarn.types import Action, Alert, Block, Distribution, Finding, RunInfo, Values

_MOST_STEPS = 1 << 63
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


class RunWriter:
    """Records a run in a directory: `run.json` for fixed facts, `run.db` for readings and events.

    `append` copies the values and returns; a thread writes them about once a second. A full or failing disk never
    raises here: `failure` says what is wrong, and the run continues unrecorded until the disk works again. After a
    fork, only the process that created the writer writes.
    """

    def __init__(
        self, path: str | Path, *, info: RunInfo, config: Mapping[str, Any], resume_at: int | None = None
    ) -> None:
        """Begin a new run. With `resume_at`, continue the existing run and delete everything from that step on.

        Raises RunExistsError if the path holds a run, unless it is resumed, and FileExistsError if a live process
        writes to it. Raises NotADirectoryError if the path is a file. Raises RunError if the run to resume is missing
        or damaged.
        """
        self.path = Path(path)
        self._process = os.getpid()
        self._numbering = Numbering()
        self._claim = Claim()
        if os.path.lexists(self.path) and not os.path.isdir(self.path):  # unlike the methods of Path, these never raise
            what = "a file" if os.path.exists(self.path) else "a link to nothing"
            raise NotADirectoryError(f"{self.path} is {what}; a run needs a directory, so name another path with run=")
        begin: Begin
        if resume_at is None:
            begin = partial(_create, self.path, info, config, self._numbering, self._claim)
        else:
            begin = _Resume(self.path, info, config, self._numbering, self._claim, resume_at)
        beginning = self._first_try(begin)
        self._background = BackgroundWriter(self.path / database.NAME, begin, beginning, self._numbering.settle)
        # Also closes a writer that is no longer referenced, not only at the end of the process.
        self._finalizer = weakref.finalize(self, _finish, self._background, self._claim, "not closed")

    def _first_try(self, begin: Begin) -> Beginning | Exception:
        """The result of `begin`, or the disk error that it raised. Other errors are raised to the user."""
        try:
            return begin()
        except BlockingIOError as error:
            raise FileExistsError(
                f"{self.path} is being written by a process that is still running; name another path with run=, or"
                " close its monitor first if it is in this process"
            ) from error
        except FileExistsError as error:
            self._claim.release()
            if not os.path.exists(self.path / manifest.NAME):
                raise RunExistsError(
                    f"{self.path} holds a {database.NAME} without its {manifest.NAME}: a process is starting a run"
                    " there, or was killed while it did; name another path with run="
                ) from error
            raise RunExistsError(
                f"{self.path} already holds a run; continue it with resume=True, or name another path with run="
            ) from error
        except RunError:
            self._claim.release()
            raise
        except (ImportError, OSError, sqlite3.Error) as error:  # ImportError: no file could be opened for a module
            if getattr(error, "sqlite_errorcode", 0) & 0xFF in _DAMAGED:
                self._claim.release()
                raise RunError(f"{self.path} cannot be resumed: {database.NAME} is damaged ({error})") from error
            return error

    @property
    def failure(self) -> str | None:
        """Why the run is not being recorded right now, in one sentence; None if it is."""
        return self._background.failure

    @property
    def journal(self) -> str | None:
        """`WAL`, or `TRUNCATE` on a network file system; None until the run has begun."""
        return self._background.journal

    def append(self, step: int, blocks: Sequence[Block], distributions: Sequence[Distribution] = ()) -> None:
        """Record the blocks of one step, in order, and its histograms: some tens of microseconds for 2,000 values.

        The same step may be appended again, even later.
        """
        background = self._ready()
        if background is None:
            return
        if self._claim.is_contested:  # the writer that was resumed from may have ended since
            with suppress(OSError):
                self._claim.take(self.path)
        if not -_MOST_STEPS <= step < _MOST_STEPS:
            raise ValueError(f"step {step} is out of range; a 64-bit number is expected")
        if (
            isinstance(blocks, RowOfNumbers)
            and not (distributions or background.full)
            and self._numbering.add_numbers(blocks, background.put)
        ):
            return
        histograms = [(one.time, one.name, one.scopes, list(bands(one))) for one in distributions]
        if isinstance(blocks, Sheet):
            if background.full:
                background.drop()
                return
            body = blocks.values.astype(FLOATS).view(np.uint8).data
            time_bytes = np.array([blocks.time], TIMES).tobytes()
            self._numbering.add(Row(int(step), blocks.layout, True, time_bytes, body, histograms), background.put)
            return
        for block in blocks:
            if block.step != step or block.values.size != len(block.scopes):
                raise ValueError(
                    f"{block.name} of step {block.step} has {block.values.size} values for {len(block.scopes)} scopes;"
                    f" blocks of step {step} with one value for each scope are expected"
                )
        if background.full:
            background.drop()
            return
        times = [block.time for block in blocks]
        shared = not blocks or times.count(times[0]) == len(times)
        body = _joined([block.values for block in blocks])
        packed = np.array(times[:1] if shared else times, TIMES).tobytes()
        layouts = [(block.name, block.scopes) for block in blocks]
        self._numbering.add(Row(int(step), layouts, shared, packed, body, histograms), background.put)

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

    def describe(self, info: RunInfo) -> None:
        """Replace what is known about the run, once ranks with other parts of the model have told about them."""
        if self._ready() is not None:
            with suppress(OSError, RunError):  # a full disk, which the readings report
                before = read_manifest(self.path)
                write_manifest(self.path, replace(before, info=replace(info, started=before.info.started)))

    def flush(self) -> None:
        """Wait until everything is on disk, or `failure` says why it is not."""
        background = self._ready()
        if background is not None:
            background.flush()

    def close(self, reason: str = "completed") -> None:
        """Record the end of the run and compact it into one file. Closing again does nothing."""
        background = self._ready()
        if background is not None:
            _finish(background, self._claim, reason)
            self._finalizer.detach()  # last, so that an interrupt does not lose queued rows

    def _ready(self) -> BackgroundWriter | None:
        """The background writer; None after closing and in a forked child."""
        return self._background if os.getpid() == self._process and self._finalizer.alive else None

    def _record(self, step: int, kind: str, record: Record) -> None:
        background = self._ready()
        if background is not None and not background.full:
            text = to_text(record)
            background.put([(INSERT_RECORD, (time.time(), step, kind, text))], len(text))


def _create(path: Path, info: RunInfo, config: Mapping[str, Any], numbering: Numbering, claim: Claim) -> Beginning:
    """Create a new run. If this fails, nothing is left behind, so it can be tried again."""
    path.mkdir(parents=True, exist_ok=True)
    claim.take(path)
    if (path / manifest.NAME).exists():
        raise FileExistsError(path / manifest.NAME)
    file, journal = path / database.NAME, _journal_for(path)
    database.create_database(file, journal, database.page_bytes_for(len(info.parameters)))
    try:
        write_manifest(path, Manifest(info, config, journal))
    except OSError:
        database.delete_database(file)
        raise
    return Beginning(journal, 0, numbering.begin(Interning(), 0))


class _Resume:
    """Continues a run from a step. It can be tried again unless another process has resumed the run since."""

    def __init__(
        self, path: Path, info: RunInfo, config: Mapping[str, Any], numbering: Numbering, claim: Claim, step: int
    ) -> None:
        self._path = path
        self._info = info
        self._config = config
        self._numbering = numbering
        self._claim = claim
        self._step = step
        self._generation: int | None = None

    def __call__(self) -> Beginning:
        path, file, interning = self._path, self._path / database.NAME, Interning()
        if not (path / manifest.NAME).exists() or not file.exists():
            raise RunError(f"{path} holds no run to resume; leave out resume to begin one, or name another path")
        started = read_manifest(path).info.started
        with suppress(BlockingIOError):  # such as a hanging process, which will notice that it was superseded
            self._claim.take(path)
        journal = _journal_for(path)
        connection = database.open_for_writing(file, journal)
        try:
            database.check_schema(connection, file)
            generation = database.generation_of(connection)
            if self._generation not in (None, generation):
                raise SupersededError
            self._generation = generation
            database.upgrade(connection)
            truncate(connection, self._step, time.time())
            num_rows = database.num_rows(connection)
            self._generation = database.generation_of(connection)
            interning.load(connection)
        except RunError as error:
            raise RunError(f"{path} cannot be resumed: {error}") from error
        finally:
            connection.close()
        info = replace(self._info, started=started or self._info.started)
        write_manifest(path, Manifest(info, self._config, journal))
        return Beginning(journal, self._generation, self._numbering.begin(interning, num_rows))


def _joined(values: Sequence[Values]) -> memoryview:
    """The bytes of many arrays in one block, copied once on the training thread. SQLite reads it in place."""
    if not values:
        return memoryview(b"")
    if all(part.size == 1 for part in values):  # as on every step
        joined = np.array([part.item() for part in values], FLOATS)
    else:
        joined = np.concatenate(values, axis=None, dtype=FLOATS, casting="unsafe")
    return joined.view(np.uint8).data


def _finish(background: BackgroundWriter, claim: Claim, reason: str) -> None:
    if os.getpid() != background.process:
        return
    background.stop([(INSERT_EVENT, (time.time(), "end", encoded({"reason": reason})))])
    claim.release()


def _journal_for(path: Path) -> str:
    return "WAL" if network_file_system(path) is None else "TRUNCATE"
