"""The tail: rows as they were appended, one blob each, not yet compacted."""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from forewarn.store.catalog import Catalog
from forewarn.store.chunks import FLOATS
from forewarn.store.errors import RunError
from forewarn.types import Values

INSERT_ROW = "INSERT INTO tail (row, step, pattern, times, body) VALUES (?, ?, ?, ?, ?)"


@dataclass(frozen=True, slots=True)
class TailRow:
    row: int
    step: int
    pattern: int
    times: bytes
    body: bytes


@dataclass(frozen=True, slots=True)
class LayoutRows:
    """The values of one layout in the order they were appended."""

    rows: NDArray[np.int64]
    values: Values
    """As [occurrences, scopes]."""


@dataclass(frozen=True, slots=True)
class _Part:
    """The values of one layout in the rows of one pattern."""

    rows: NDArray[np.int64]
    position: int
    values: Values


def oldest_rows(connection: sqlite3.Connection, most_bytes: int, most_rows: int) -> list[TailRow]:
    """The oldest rows, up to a number of rows or bytes."""
    rows, size = [], 0
    for row in connection.execute("SELECT row, step, pattern, times, body FROM tail ORDER BY row LIMIT ?", [most_rows]):
        rows.append(TailRow(*row))
        size += len(rows[-1].body)
        if size >= most_bytes:
            break
    return rows


def rows_between(connection: sqlite3.Connection, first: int, end: int) -> list[TailRow]:
    """Rows from `first` up to, not including, `end`."""
    rows = connection.execute(
        "SELECT row, step, pattern, times, body FROM tail WHERE row >= ? AND row < ? ORDER BY row", [first, end]
    )
    return [TailRow(*row) for row in rows]


def num_bytes_between(connection: sqlite3.Connection, first: int, end: int) -> int:
    """The size of the values in these rows in bytes. SQLite knows it without reading them."""
    sizes = connection.execute("SELECT sum(length(body)) FROM tail WHERE row >= ? AND row < ?", [first, end])
    return int(sizes.fetchone()[0] or 0)


def column_in_tail(connection: sqlite3.Connection, catalog: Catalog, layout: int, column: int) -> Values:
    """The values of one scope. SQLite cuts them out of the blobs, so little is copied."""
    rows, positions, values = [], [], []
    used = {number for (number,) in connection.execute("SELECT DISTINCT pattern FROM tail")}
    owners = set(catalog.table.owners[catalog.table.members == layout].tolist())
    for number in used & owners:
        pattern = catalog.patterns[number]
        begins = [0, *accumulate(catalog.layouts[id].num_scopes for id in pattern.layouts)]
        for position in [index for index, id in enumerate(pattern.layouts) if id == layout]:
            offset = (begins[position] + column) * FLOATS.itemsize
            for row, size, value in connection.execute(
                "SELECT row, length(body), substr(body, ?, ?) FROM tail WHERE pattern = ?",
                [offset + 1, FLOATS.itemsize, number],
            ):
                _check_size(row, size, pattern.num_values)
                rows.append(row)
                positions.append(position)
                values.append(value)
    return np.frombuffer(b"".join(values), FLOATS)[np.lexsort((positions, rows))]


def by_layout(rows: list[TailRow], catalog: Catalog) -> dict[int, LayoutRows]:
    """The values of rows by layout. Rows of one pattern are handled together."""
    alike: defaultdict[int, list[TailRow]] = defaultdict(list)
    for row in rows:
        alike[row.pattern].append(row)
    parts: defaultdict[int, list[_Part]] = defaultdict(list)
    for number, members in alike.items():
        if not 0 <= number < len(catalog.patterns):
            raise RunError(f"row {members[0].row} is damaged: there is no pattern {number}")
        pattern = catalog.patterns[number]
        values = _matrix(members, pattern.num_values)
        numbers = np.array([row.row for row in members], np.int64)
        begin = 0
        for position, layout in enumerate(pattern.layouts):
            end = begin + catalog.layouts[layout].num_scopes
            parts[layout].append(_Part(numbers, position, values[:, begin:end]))
            begin = end
    return {layout: _in_order(members) for layout, members in parts.items()}


def _matrix(rows: list[TailRow], num_values: int) -> Values:
    for row in rows:
        _check_size(row.row, len(row.body), num_values)
    return np.frombuffer(b"".join(row.body for row in rows), FLOATS).reshape(len(rows), num_values)


def _check_size(row: int, size: int, num_values: int) -> None:
    if size != num_values * FLOATS.itemsize:
        raise RunError(f"row {row} is damaged: it has {size} bytes where {num_values} values belong")


def _in_order(parts: list[_Part]) -> LayoutRows:
    """Join rows of different patterns, which alternate, in the order they were appended."""
    if len(parts) == 1:
        return LayoutRows(parts[0].rows, parts[0].values)
    rows = np.concatenate([part.rows for part in parts])
    positions = np.concatenate([np.full(len(part.rows), part.position) for part in parts])
    order = np.lexsort((positions, rows))
    return LayoutRows(rows[order], np.concatenate([part.values for part in parts])[order])
