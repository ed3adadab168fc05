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
    """The step and blocks of each selected row. `index` is the index when the replay began."""
    for stretch in stretches(reading, index, selected):
        yield from stretch.rows(selected)


def stretches(reading: Reading, index: Index, selected: NDArray[np.bool_]) -> Iterator[Stretch]:
    """All selected rows, and perhaps others between them, many at a time.

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
        yield Stretch(catalog, index, first, end, values, scopes)
        following = following[np.searchsorted(following, end) :]


class Stretch:
    """Consecutive rows in memory, one by one as blocks or each metric as a matrix."""

    def __init__(
        self,
        catalog: Catalog,
        index: Index,
        first: int,
        end: int,
        values: dict[int, Values],
        scopes: dict[int, tuple[str, ...]],
    ) -> None:
        self.steps = index.steps[first:end]
        self.patterns = index.patterns[first:end]
        """For each row a number: rows with the same number have the same metrics and scopes."""
        self._catalog = catalog
        self._index = index
        self._first = first
        self._values = values
        self._scopes = scopes
        self._begins: dict[int, NDArray[np.int64]] = {}
        """By layout: the number of its occurrences before each row and in all of them."""

    def __len__(self) -> int:
        return len(self.steps)

    def rows(self, selected: NDArray[np.bool_]) -> Iterator[tuple[int, list[Block]]]:
        """The step and blocks of each row that is selected; `selected` is about all rows of the run."""
        streams = {layout: iter(rows) for layout, rows in self._values.items()}
        for place, (number, step) in enumerate(zip(self.patterns.tolist(), self.steps.tolist(), strict=True)):
            layouts = self._catalog.patterns[number].layouts
            blocks = self._blocks(place, step, [next(streams[layout]) for layout in layouts])
            if selected[self._first + place]:
                yield step, blocks

    def row(self, place: int) -> tuple[int, list[Block]]:
        """The step and blocks of one row."""
        step, taken = int(self.steps[place]), dict[int, int]()
        values: list[Values] = []
        for layout in self._catalog.patterns[self.patterns[place]].layouts:
            number = taken.get(layout, 0)  # a metric may be appended twice in one call
            taken[layout] = number + 1
            values.append(self._values[layout][self._begin(layout).item(place) + number])
        return step, self._blocks(place, step, values)

    def layouts(self, pattern: int) -> list[tuple[str, tuple[str, ...]]]:
        """The metrics and scopes of the rows with this pattern, in order."""
        return [
            (self._catalog.layouts[layout].name, self._scopes[layout])
            for layout in self._catalog.patterns[pattern].layouts
        ]

    def column(self, name: str, first: int, end: int) -> tuple[tuple[str, ...], NDArray[np.int64], Values] | None:
        """The scopes, rows and values of a metric among these rows; None if its scopes change or a row has two."""
        column: tuple[tuple[str, ...], NDArray[np.int64], Values] | None = None
        for layout in self._values:
            if self._catalog.layouts[layout].name != name:
                continue
            begins = self._begin(layout)[first : end + 1]
            count = int(begins[-1] - begins[0])
            if count == 0:
                continue
            rows = np.flatnonzero(np.diff(begins))
            if column is not None or len(rows) != count:
                return None
            column = self._scopes[layout], rows + first, self._values[layout][begins[0] : begins[-1]]
        return column

    def _blocks(self, place: int, step: int, values: list[Values]) -> list[Block]:
        pattern = self._catalog.patterns[self.patterns[place]]
        times = self._index.times_of(self._first + place, pattern.num_times).tolist()
        return [
            Block(
                step,
                times[0 if pattern.shared else position],
                self._catalog.layouts[layout].name,
                self._scopes[layout],
                values[position],
            )
            for position, layout in enumerate(pattern.layouts)
        ]

    def _begin(self, layout: int) -> NDArray[np.int64]:
        begins = self._begins.get(layout)
        if begins is None:
            table = self._catalog.table
            counts = np.bincount(table.owners[table.members == layout], minlength=len(self._catalog.patterns))
            begins = self._begins[layout] = np.concatenate([[0], np.cumsum(counts[self.patterns])])
        return begins


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
