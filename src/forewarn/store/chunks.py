"""Chunks: the values of one layout over many rows, scope by scope."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from forewarn.store.errors import RunError
from forewarn.types import Values

FLOATS = np.dtype("<f4")

_BAND_VALUES = 4000
"""Values in a band, almost 16 KB: little to read for one series among thousands, and few rows to write.

It is slightly less than 16 KB so that a band with SQLite's header fits in a page of 16 KB, and four in one of 64 KB.
"""

_COLUMNS = "id, layout, first, last, count, level, band, band_scopes"


@dataclass(frozen=True, slots=True)
class Chunk:
    id: int
    layout: int
    first: int
    """The row of its first value."""
    last: int
    """The row of its last value."""
    count: int
    """Number of values of each scope."""
    level: int
    """Number of times it was merged from smaller chunks."""
    band: int
    """The number of its first band; the others follow."""
    band_scopes: int
    """Number of scopes in a band; the last band may hold fewer."""

    def num_bands(self, num_scopes: int) -> int:
        return -(-num_scopes // self.band_scopes)


def write_chunk(connection: sqlite3.Connection, layout: int, first: int, last: int, level: int, values: Values) -> None:
    """Store `values` of shape [scopes, count]. Bands are slices of its bytes, so no value is touched."""
    count = values.shape[1]
    band_scopes = max(1, _BAND_VALUES // count)
    band = connection.execute("SELECT coalesce(max(id) + 1, 0) FROM bands").fetchone()[0]
    connection.execute(
        "INSERT INTO chunks (layout, first, last, count, level, band, band_scopes) VALUES (?, ?, ?, ?, ?, ?, ?)",
        [layout, first, last, count, level, band, band_scopes],
    )
    body = np.ascontiguousarray(values, FLOATS).reshape(-1).view(np.uint8).data
    stride = band_scopes * count * FLOATS.itemsize
    slices = (body[begin : begin + stride] for begin in range(0, len(body), stride))
    connection.executemany("INSERT INTO bands VALUES (?, ?)", enumerate(slices, band))


def read_chunk(connection: sqlite3.Connection, chunk: Chunk, num_scopes: int) -> Values:
    """All values of a chunk, as [scopes, count]."""
    ids = [chunk.band, chunk.band + chunk.num_bands(num_scopes)]
    sizes = connection.execute("SELECT sum(length(body)) FROM bands WHERE id >= ? AND id < ?", ids)
    _check_size(sizes.fetchone()[0], chunk, num_scopes)
    bands = connection.execute("SELECT body FROM bands WHERE id >= ? AND id < ? ORDER BY id", ids)
    return _matrix(b"".join(body for (body,) in bands), chunk, num_scopes)


def delete_chunk(connection: sqlite3.Connection, chunk: Chunk, num_scopes: int) -> None:
    connection.execute(
        "DELETE FROM bands WHERE id >= ? AND id < ?", [chunk.band, chunk.band + chunk.num_bands(num_scopes)]
    )
    connection.execute("DELETE FROM chunks WHERE id = ?", [chunk.id])


def chunks_between(connection: sqlite3.Connection, layout: int, first: int, end: int) -> list[Chunk]:
    """The chunks of `layout` that hold a row from `first` up to, not including, `end`; in order."""
    rows = connection.execute(
        f"SELECT {_COLUMNS} FROM chunks WHERE layout = :layout AND last >= :first AND first < :end AND first >="
        " coalesce((SELECT max(first) FROM chunks WHERE layout = :layout AND first <= :first), :first) ORDER BY first",
        {"layout": layout, "first": first, "end": end},
    )
    return [_chunk(row) for row in rows]


def chunks_backwards(connection: sqlite3.Connection, layout: int) -> Iterator[Chunk]:
    """The chunks of `layout`, newest first."""
    rows = connection.execute(f"SELECT {_COLUMNS} FROM chunks WHERE layout = ? ORDER BY first DESC", [layout])
    return (_chunk(row) for row in rows)


def num_values(connection: sqlite3.Connection, layout: int) -> int:
    """The number of values of each scope in all chunks."""
    return int(
        connection.execute("SELECT coalesce(sum(count), 0) FROM chunks WHERE layout = ?", [layout]).fetchone()[0]
    )


def column_of(connection: sqlite3.Connection, layout: int, num_scopes: int, column: int) -> list[Values]:
    """The values of one scope, chunk by chunk. Only one band of each chunk is read."""
    parts = []
    rows = connection.execute(
        f"SELECT {', '.join('chunks.' + name for name in _COLUMNS.split(', '))}, body FROM chunks"
        " LEFT JOIN bands ON bands.id = band + ? / band_scopes WHERE layout = ? ORDER BY first",
        [column, layout],
    )
    for *row, body in rows:
        chunk = _chunk(row)
        before = column - column % chunk.band_scopes
        band = _matrix(body, chunk, min(chunk.band_scopes, num_scopes - before))
        parts.append(band[column - before].copy())  # a view would keep the whole band
    return parts


def _chunk(row: list[int]) -> Chunk:
    if not all(isinstance(number, int) for number in row):
        raise RunError(f"chunk {row[0]} is damaged")
    chunk = Chunk(*row)
    if chunk.count < 1 or chunk.band_scopes < 1 or chunk.first > chunk.last:
        raise RunError(f"chunk {chunk.id} is damaged")
    return chunk


def _matrix(body: bytes | None, chunk: Chunk, num_scopes: int) -> Values:
    _check_size(len(body) if isinstance(body, bytes) else None, chunk, num_scopes)
    return np.frombuffer(body or b"", FLOATS).reshape(num_scopes, chunk.count)


def _check_size(num_bytes: int | None, chunk: Chunk, num_scopes: int) -> None:
    if (num_bytes or 0) != num_scopes * chunk.count * FLOATS.itemsize:
        raise RunError(f"rows {chunk.first} to {chunk.last} are damaged: values of layout {chunk.layout} are missing")
