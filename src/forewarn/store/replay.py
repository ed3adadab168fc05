"""Reads rows back in order, bit for bit as they were appended, in bounded memory."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import numpy as np
from numpy.typing import NDArray

from forewarn.store.catalog import Catalog
from forewarn.store.chunks import FLOATS, chunks_between, read_chunk
from forewarn.store.errors import RunError
from forewarn.store.index import Index, occurrences
from forewarn.store.tail import by_layout, num_bytes_between, rows_between
from forewarn.types import Block, Values

Reading = Callable[[], AbstractContextManager[tuple[sqlite3.Connection, Catalog, Index]]]
"""Opens a read transaction; yields it with its catalog and an index of at least all compacted rows."""

_WINDOW_ROWS = 16384
_WINDOW_BYTES = 32 << 20
"""Maximum held in memory at once: enough that large chunks are not read too often."""


def replay(reading: Reading, index: Index, selected: NDArray[np.bool_]) -> Iterator[tuple[int, list[Block]]]:
    """The step and blocks of each selected row. `index` is the index when the replay began.

    Rows are read in windows, each in its own transaction, so that a slow consumer does not hold up the writer's log.
    Between two windows, rows may be compacted together with newer ones that `index` lacks.
    """
    following = np.flatnonzero(selected)
    while len(following):
        first = int(following[0])
        with reading() as (connection, catalog, newest):
            end = _window_end(catalog, index, first)
            oldest = connection.execute("SELECT min(row) FROM tail").fetchone()[0]
            if oldest is None or first < oldest:
                end = end if oldest is None else min(end, oldest)
                layouts = _layouts_between(catalog, index, first, end)
                values = {layout: _from_chunks(connection, catalog, newest, layout, first, end) for layout in layouts}
            else:
                values = _from_tail(connection, catalog, index, first, end)
            scopes = {layout: catalog.scopes_of(catalog.layouts[layout], connection) for layout in values}
        yield from _blocks(catalog, index, selected, first, end, values, scopes)
        following = following[np.searchsorted(following, end) :]


def _blocks(
    catalog: Catalog,
    index: Index,
    selected: NDArray[np.bool_],
    first: int,
    end: int,
    values: dict[int, Values],
    scopes: dict[int, tuple[str, ...]],
) -> Iterator[tuple[int, list[Block]]]:
    streams = {layout: iter(rows) for layout, rows in values.items()}
    steps = index.steps[first:end].tolist()
    patterns = index.patterns[first:end].tolist()
    for row, (number, step) in enumerate(zip(patterns, steps, strict=True), first):
        pattern = catalog.patterns[number]
        times = index.times_of(row, pattern.num_times).tolist()
        blocks = [
            Block(
                step,
                times[0 if pattern.shared else position],
                catalog.layouts[layout].name,
                scopes[layout],
                next(streams[layout]),
            )
            for position, layout in enumerate(pattern.layouts)
        ]
        if selected[row]:
            yield step, blocks


def _window_end(catalog: Catalog, index: Index, first: int) -> int:
    patterns = index.patterns[first : first + _WINDOW_ROWS]
    sizes = np.cumsum(catalog.table.num_values[patterns] * FLOATS.itemsize)
    return first + max(1, int(np.searchsorted(sizes, _WINDOW_BYTES)))


def _layouts_between(catalog: Catalog, index: Index, first: int, end: int) -> set[int]:
    used = np.unique(index.patterns[first:end]).tolist()
    return {layout for number in used for layout in catalog.patterns[number].layouts}


def _from_tail(
    connection: sqlite3.Connection, catalog: Catalog, index: Index, first: int, end: int
) -> dict[int, Values]:
    num_values = catalog.table.num_values[index.patterns[first:end]].sum()
    if num_bytes_between(connection, first, end) != num_values * FLOATS.itemsize:
        raise RunError(f"rows {first} to {end - 1} are damaged: {num_values} values were expected")
    rows = rows_between(connection, first, end)
    if [row.pattern for row in rows] != index.patterns[first:end].tolist():
        raise RunError(f"rows {first} to {end - 1} are damaged: they have changed since the replay began")
    return {layout: part.values for layout, part in by_layout(rows, catalog).items()}


def _from_chunks(
    connection: sqlite3.Connection, catalog: Catalog, index: Index, layout: int, first: int, end: int
) -> Values:
    """The values of one layout in a window, as [occurrences, scopes]."""
    num_scopes = catalog.layouts[layout].num_scopes
    parts: list[Values] = []
    last = -1
    for chunk in chunks_between(connection, layout, first, end):
        if chunk.first <= last:
            raise RunError(f"rows {chunk.first} to {last} are damaged: two chunks of layout {layout} hold them")
        last = chunk.last
        rows = occurrences(index, catalog, layout, chunk.first, chunk.last + 1).rows
        if len(rows) != chunk.count:
            raise RunError(f"rows {chunk.first} to {chunk.last} are damaged: {len(rows)} values were expected")
        begin, stop = np.searchsorted(rows, [first, end])
        parts.append(read_chunk(connection, chunk, num_scopes)[:, begin:stop].T)
    expected = len(occurrences(index, catalog, layout, first, end).rows)
    if sum(len(part) for part in parts) != expected:
        raise RunError(f"rows {first} to {end - 1} are damaged: {expected} values of layout {layout} were expected")
    values = np.ascontiguousarray(np.concatenate(parts))
    values.flags.writeable = False
    return values
