"""Merging small chunks and spans into larger ones, so that a long series is read in few pieces.

Each merge joins sixteen neighbors of one level, so a value is rewritten once per factor of sixteen. For a million steps
that is three times, whether a metric is recorded on every step or on every hundredth.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator

import numpy as np

from forewarn.store.catalog import Catalog
from forewarn.store.chunks import FLOATS, Chunk, chunks_backwards, delete_chunk, read_chunk, write_chunk
from forewarn.store.columns import MOST_ROWS, joined, packed, unpacked
from forewarn.store.database import transaction

_NEIGHBOURS = 16

_MOST_BYTES = 16 << 20
"""Maximum size of a merged chunk, since merging and replaying hold one in memory."""

_SETTLED = 99
"""The level of chunks and spans that are large enough."""


def merges(connection: sqlite3.Connection, catalog: Catalog) -> Iterator[None]:
    """Merge what is due, one transaction at a time, so the caller can do other work in between."""
    while True:
        due = _due_chunks(connection)
        changed = False
        for layout, level in due:
            changed |= _merge_chunks(connection, catalog, layout, level)
            yield
        for level in _due_spans(connection):
            changed |= _merge_spans(connection, level)
            yield
        if not changed:
            return


def _due_chunks(connection: sqlite3.Connection) -> list[tuple[int, int]]:
    return connection.execute(
        "SELECT layout, level FROM chunks WHERE level < ? GROUP BY level, layout HAVING count(*) >= ?",
        [_SETTLED, _NEIGHBOURS],
    ).fetchall()


def _merge_chunks(connection: sqlite3.Connection, catalog: Catalog, layout: int, level: int) -> bool:
    num_scopes = catalog.layouts[layout].num_scopes
    with transaction(connection):
        run = _newest_of_level(chunks_backwards(connection, layout), level)
        if len(run) < _NEIGHBOURS:
            return False
        count = sum(chunk.count for chunk in run)
        if count > MOST_ROWS or count * num_scopes * FLOATS.itemsize > _MOST_BYTES:
            connection.executemany("UPDATE chunks SET level = ? WHERE id = ?", [(_SETTLED, chunk.id) for chunk in run])
            return True
        values = np.concatenate([read_chunk(connection, chunk, num_scopes) for chunk in run], axis=1)
        for chunk in run:
            delete_chunk(connection, chunk, num_scopes)
        write_chunk(connection, layout, run[0].first, run[-1].last, level + 1, values)
    return True


def _newest_of_level(newest_first: Iterator[Chunk], level: int) -> list[Chunk]:
    """Neighbors of one level, oldest first. A chunk of another level ends the group."""
    run: list[Chunk] = []
    for chunk in newest_first:
        if chunk.level > level or (run and chunk.level != level):
            break
        if chunk.level == level:
            run.append(chunk)
    return run[::-1]


def _due_spans(connection: sqlite3.Connection) -> list[int]:
    rows = connection.execute(
        "SELECT level FROM spans WHERE level < ? GROUP BY level HAVING count(*) >= ?", [_SETTLED, _NEIGHBOURS]
    )
    return [level for (level,) in rows]


def _merge_spans(connection: sqlite3.Connection, level: int) -> bool:
    with transaction(connection):
        run: list[tuple[int, int]] = []
        for first, last, its_level in connection.execute("SELECT first, last, level FROM spans ORDER BY first DESC"):
            if its_level > level or (run and its_level != level):
                break
            if its_level == level:
                run.append((first, last))
        if len(run) < _NEIGHBOURS:
            return False
        first, last = run[-1][0], run[0][1]
        if last - first + 1 > MOST_ROWS:
            connection.execute("UPDATE spans SET level = ? WHERE first BETWEEN ? AND ?", [_SETTLED, first, last])
            return True
        columns = connection.execute(
            "SELECT first, last, steps, patterns, times FROM spans WHERE first BETWEEN ? AND ? ORDER BY first",
            [first, last],
        ).fetchall()
        connection.execute("DELETE FROM spans WHERE first BETWEEN ? AND ?", [first, last])
        merged = packed(joined([unpacked(*span) for span in columns]))
        connection.execute("INSERT INTO spans VALUES (?, ?, ?, ?, ?, ?)", [first, last, level + 1, *merged])
    return True
