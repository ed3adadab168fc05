"""run.db: its tables, and how it is opened for writing and for reading.

A *row* is one call of `RunWriter.append`: the blocks of one step. Rows are numbered from 0 without a gap and first
written to the *tail*. Compaction then stores them by column. A *span* holds the steps and times of many rows. A *chunk*
holds the values of one layout over many rows, in *bands* of a few scopes, so one series can be read without the others.

A *layout* is the name of a metric with its scopes. A *pattern* is the ordered list of layouts in a row. Both recur, so
a row refers to them by number.

Histograms are in a separate table. No rule reads them, so no replay does either.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from functools import cache
from pathlib import Path
from urllib.parse import quote

from forewarn.files import check_regular
from forewarn.store.errors import RunError
from forewarn.store.histogram_table import teach_packing
from forewarn.store.manifest import FORMAT
from forewarn.store.read_limits import ReadLimits

NAME = "run.db"

_APPLICATION = int.from_bytes(b"4wrn", "big")
"""Stored by SQLite in the file header, to tell our databases from others."""

_BUSY_SECONDS = 20.0
_LEFT_BEHIND_SECONDS = 30.0
_CHECKPOINT_BYTES = 16 << 20
"""The log is copied into the database every 16 MB instead of SQLite's 4 MB, because each copy costs an fsync."""
_LOG_BYTES = 64 << 20
_PAGE_BYTES = 1 << 12, 1 << 16
"""The smallest page, which is SQLite's default, and the largest that it supports."""
_PAGE_BYTES_PER_TENSOR = 64
"""Half of the bytes that a tensor writes on a step measured in detail."""

_TABLES = """
CREATE TABLE generation (number INTEGER NOT NULL);
CREATE TABLE scopes (id INTEGER PRIMARY KEY, names TEXT NOT NULL);
CREATE TABLE layouts (
    id INTEGER PRIMARY KEY, name TEXT NOT NULL, scopes INTEGER NOT NULL, num_scopes INTEGER NOT NULL);
CREATE TABLE patterns (id INTEGER PRIMARY KEY, shared INTEGER NOT NULL, layouts BLOB NOT NULL);
CREATE TABLE tail (
    row INTEGER PRIMARY KEY, step INTEGER NOT NULL, pattern INTEGER NOT NULL, times BLOB NOT NULL, body BLOB NOT NULL);
CREATE TABLE spans (
    first INTEGER PRIMARY KEY, last INTEGER NOT NULL, level INTEGER NOT NULL,
    steps BLOB NOT NULL, patterns BLOB NOT NULL, times BLOB NOT NULL);
CREATE TABLE chunks (
    id INTEGER PRIMARY KEY, layout INTEGER NOT NULL, first INTEGER NOT NULL, last INTEGER NOT NULL,
    count INTEGER NOT NULL, level INTEGER NOT NULL, band INTEGER NOT NULL, band_scopes INTEGER NOT NULL);
CREATE UNIQUE INDEX chunks_in_order ON chunks (layout, first);
CREATE INDEX chunks_by_level ON chunks (level, layout);
CREATE TABLE bands (id INTEGER PRIMARY KEY, body BLOB NOT NULL);
CREATE TABLE records (
    id INTEGER PRIMARY KEY, time REAL NOT NULL, step INTEGER NOT NULL, kind TEXT NOT NULL, body TEXT NOT NULL);
CREATE INDEX records_by_kind ON records (kind, id);
CREATE TABLE events (id INTEGER PRIMARY KEY, time REAL NOT NULL, kind TEXT NOT NULL, data TEXT NOT NULL);
INSERT INTO generation VALUES (0);
"""

_TABLES_OF_HISTOGRAMS = """
CREATE TABLE IF NOT EXISTS distributions (
    id INTEGER PRIMARY KEY, step INTEGER NOT NULL, time REAL NOT NULL, name TEXT NOT NULL, scopes INTEGER NOT NULL,
    first INTEGER NOT NULL, count INTEGER NOT NULL, body BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS distributions_by_name ON distributions (name, scopes, first);
"""
"""Also created on resume, because a run started by an older version lacks them."""

_BESIDE = ("-wal", "-shm", "-journal")
"""Suffixes of the files that SQLite keeps beside a database."""
_ANOTHER_JOURNAL = bytes.fromhex("d9d505f920a163d7")
"""The end of a journal that names another file, which SQLite would delete. We never write such a journal."""


def page_bytes_for(num_tensors: int) -> int:
    """The page size for a run with this many tensors, a power of two.

    SQLite copies, checks and writes whole pages, so large pages make wide rows cheaper. Each table takes at least one
    page and each commit writes a few, so small pages keep small runs small.
    """
    smallest, largest = _PAGE_BYTES
    return min(largest, max(smallest, 1 << (num_tensors * _PAGE_BYTES_PER_TENSOR - 1).bit_length()))


def create_database(path: Path, journal: str, page_bytes: int) -> None:
    """Create a database with empty tables. Raises FileExistsError if the file exists."""
    path.open("xb").close()
    try:
        connection = open_for_writing(path, journal, page_bytes)
        try:
            with transaction(connection):
                _make_tables(connection)
                connection.execute(f"PRAGMA application_id = {_APPLICATION}")
                connection.execute(f"PRAGMA user_version = {FORMAT}")
        finally:
            connection.close()
    except (OSError, sqlite3.Error):
        delete_database(path)
        raise


def _make_tables(connection: sqlite3.Connection) -> None:
    for statement in (_TABLES + _TABLES_OF_HISTOGRAMS).split(";"):
        connection.execute(statement)


_SCHEMA = "SELECT type, name, sql FROM sqlite_master"


@cache
def _own_schema() -> frozenset[tuple[str, str, str]]:
    with closing(sqlite3.connect(":memory:")) as connection:
        _make_tables(connection)
        return frozenset(connection.execute(_SCHEMA))


def check_schema(connection: sqlite3.Connection, path: Path) -> None:
    """Raise RunError unless all tables and indexes are ours: a foreign view or trigger could run code."""
    for kind, name, statement in connection.execute(_SCHEMA):
        if (kind, name, statement) not in _own_schema():
            raise RunError(
                f"{path} holds a {kind!s:.20} {name!r:.80} that forewarn did not make; restore it from a copy"
            )


def upgrade(connection: sqlite3.Connection) -> None:
    """Upgrade a database of an older version, so that this version can write to it."""
    for statement in _TABLES_OF_HISTOGRAMS.split(";"):
        connection.execute(statement)
    connection.execute(f"PRAGMA user_version = {FORMAT}")


def delete_database(path: Path) -> None:
    """Delete the database of a run that could not be started."""
    for suffix in ("", *_BESIDE):
        path.with_name(path.name + suffix).unlink(missing_ok=True)


def open_for_writing(path: Path, journal: str, page_bytes: int | None = None) -> sqlite3.Connection:
    """A connection that writes without waiting for the disk. A killed process loses nothing that was committed.

    `page_bytes` is for a new database; an existing one keeps its page size.
    """
    connection = _connected(path, "mode=rw")
    try:
        if page_bytes is not None:
            connection.execute(f"PRAGMA page_size = {page_bytes}")
        connection.execute(f"PRAGMA journal_mode = {journal}").fetchall()
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("PRAGMA secure_delete = OFF")
        (page_bytes,) = connection.execute("PRAGMA page_size").fetchone()
        connection.execute(f"PRAGMA wal_autocheckpoint = {_CHECKPOINT_BYTES // page_bytes}")
        connection.execute(f"PRAGMA journal_size_limit = {_LOG_BYTES}").fetchall()
        teach_packing(connection)
    except sqlite3.Error:
        connection.close()
        raise
    return connection


def open_for_reading(path: Path) -> sqlite3.Connection:
    """A connection that cannot write. Raises RunError if the database is not one of ours."""
    path = Path(os.path.realpath(path))  # SQLite keeps its other files there
    try:
        return _checked(path, "mode=ro")
    except sqlite3.OperationalError as error:
        reason = getattr(error, "sqlite_errorcode", 0) & 0xFF  # Python's own errors have none
        if reason == sqlite3.SQLITE_READONLY and _left_behind(path):
            _checked(path, "mode=rw").close()
            return _checked(path, "mode=ro")
        if reason == sqlite3.SQLITE_CANTOPEN and not _size(path, "-wal"):
            return _checked(path, "mode=ro&immutable=1")  # on read-only media SQLite cannot create its other files
        raise


def _checked(path: Path, options: str) -> sqlite3.Connection:
    connection = _connected(path, options)
    try:
        connection.execute("PRAGMA cell_size_check = ON")
        ReadLimits(connection, path)
        if not _is_ours(connection):
            raise RunError(f"{path} is a database of another program; restore it from a copy")
        check_schema(connection, path)
        connection.execute("PRAGMA query_only = ON")
    except BaseException:
        connection.close()
        raise
    return connection


def _connected(path: Path, options: str) -> sqlite3.Connection:
    """A connection that accepts only a regular file and trusts nothing in it. SQLite itself opens any kind of file."""
    path = Path(os.path.realpath(path))
    check_regular(path)
    for suffix in _BESIDE:
        check_regular(path.with_name(path.name + suffix), links=False)
    uri = f"file:{quote(os.fsencode(path))}?{options}"
    connection = sqlite3.connect(uri, uri=True, timeout=_BUSY_SECONDS, isolation_level=None)
    connection.execute("PRAGMA trusted_schema = OFF")
    return connection


def _left_behind(path: Path) -> bool:
    """Whether a killed writer left half a transaction, which a process with write access must undo.

    Only a writer without a write-ahead log leaves one. On a network its locks may be invisible, so an old journal is
    the only safe sign that no process is writing.
    """
    journal = path.with_name(path.name + "-journal")
    if _size(path, "-journal") == 0 or time.time() - journal.stat().st_mtime <= _LEFT_BEHIND_SECONDS:
        return False
    with journal.open("rb") as file:
        file.seek(max(0, _size(path, "-journal") - len(_ANOTHER_JOURNAL)))
        return file.read() != _ANOTHER_JOURNAL


def _size(path: Path, suffix: str) -> int:
    file = path.with_name(path.name + suffix)
    return file.stat().st_size if file.exists() else 0


def _is_ours(connection: sqlite3.Connection) -> bool:
    return bool(connection.execute("PRAGMA application_id").fetchone()[0] == _APPLICATION)


def format_of(connection: sqlite3.Connection) -> int:
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def generation_of(connection: sqlite3.Connection) -> int:
    """Number of times the run was resumed; within one generation rows never change."""
    return int(connection.execute("SELECT number FROM generation").fetchone()[0])


def num_rows(connection: sqlite3.Connection) -> int:
    rows = connection.execute("SELECT max(row) FROM tail UNION ALL SELECT max(last) FROM spans").fetchall()
    return 1 + max((last for (last,) in rows if last is not None), default=-1)


@contextmanager
def transaction(connection: sqlite3.Connection, kind: str = "IMMEDIATE") -> Iterator[None]:
    """Commit on success, roll back on error. `DEFERRED` is for reading one consistent state of the database."""
    connection.execute(f"BEGIN {kind}")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        with suppress(sqlite3.Error):  # on a full disk SQLite has already rolled back
            connection.execute("ROLLBACK")
        raise
