"""Turns rows into SQL statements, and numbers the rows, layouts, patterns and scopes."""

from __future__ import annotations

import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from forewarn import rows
from forewarn.store.background import Item
from forewarn.store.histogram_table import INSERT_DISTRIBUTION
from forewarn.store.interning import Interning
from forewarn.store.plain import storable
from forewarn.store.tail import INSERT_ROW

_TIME = struct.Struct("<d")
_MOST_LAYOUTS = 256
"""Maximum number of layouts whose pattern is remembered."""
_MOST_UNNUMBERED = 1024
"""Maximum number of rows that wait for the writer thread to number them, in case it hangs."""

Band = tuple[int, int, bytes, memoryview]


class Row(NamedTuple):
    """A copy of the data of one `append` call. A tuple, because the training thread makes one on every step."""

    step: int
    layouts: rows.RowLayout | list[tuple[str, tuple[str, ...]]]
    """The name and the scopes of each block."""
    shared: bool
    """Whether all blocks have the same time."""
    times: bytes
    body: memoryview
    histograms: list[tuple[float, str, tuple[str, ...], list[Band]]]
    """The time, name and scopes of each distribution, and its bands."""


class Numbering:
    """Numbers rows, continuing from the rows of the run. While the run cannot be opened, rows wait."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._interning: Interning | None = None
        self._num_rows = 0
        self._waiting: list[Row] = []
        self._unnumbered: deque[rows.Row] = deque()
        """The newest rows; the training thread adds to them without a lock."""
        self._patterns: dict[rows.RowLayout, int] = {}

    def begin(self, interning: Interning, num_rows: int) -> list[Item]:
        """Continue after `num_rows` rows; returns the statements of the rows that waited."""
        with self._lock:
            self._interning, self._num_rows = interning, num_rows
            self._patterns.clear()
            waiting, self._waiting = self._waiting, []
            return [item for row in waiting for item in self._items(row, interning)]

    def add(self, row: Row, put: Callable[[Sequence[Item], int], None]) -> None:
        """Pass the statements of a row and their size to `put`, in the order of row numbers."""
        with self._lock:
            self._number(put)
            num_bytes = len(row.body)
            for *_, bands in row.histograms:
                num_bytes += sum(counts.nbytes for *_, counts in bands)
            if self._interning is None:
                self._waiting.append(row)
                put([], num_bytes)
            else:
                put(self._items(row, self._interning), num_bytes)

    def add_numbers(self, row: rows.Row, put: Callable[[Sequence[Item], int], None]) -> bool:
        """The same for a row without histograms, which `settle` passes on with others; False if it must wait."""
        if self._interning is None:
            return False
        self._unnumbered.append(row)
        if len(self._unnumbered) >= _MOST_UNNUMBERED:
            self.settle(put)
        return True

    def settle(self, put: Callable[[Sequence[Item], int], None]) -> None:
        """Pass on the rows that were only taken so far."""
        if self._unnumbered:
            with self._lock:
                self._number(put)

    def _number(self, put: Callable[[Sequence[Item], int], None]) -> None:
        items: list[Item] = []
        num_bytes = 0
        while self._unnumbered:
            row = self._unnumbered.popleft()
            assert self._interning is not None
            pattern = self._pattern_of(row.layout, self._interning)
            items += self._interning.news()
            body = row.body
            items.append((INSERT_ROW, (self._num_rows, row.step, pattern, _TIME.pack(row.time), body)))
            self._num_rows += 1
            num_bytes += len(body)
        if items:
            put(items, num_bytes)

    def _pattern_of(self, layout: rows.RowLayout, interning: Interning) -> int:
        """The number of the pattern of a layout, kept for the rows that follow."""
        number = self._patterns.get(layout)
        if number is not None:
            return number
        if len(self._patterns) >= _MOST_LAYOUTS:
            self._patterns.clear()
        layouts = tuple(map(interning.layout, layout.names, layout.scopes))
        number = self._patterns[layout] = interning.pattern(True, layouts)
        return number

    def _items(self, row: Row, interning: Interning) -> list[Item]:
        if isinstance(row.layouts, rows.RowLayout):
            pattern = self._pattern_of(row.layouts, interning)
        else:
            pattern = interning.pattern(row.shared, tuple([interning.layout(*layout) for layout in row.layouts]))
        items: list[Item] = [(INSERT_ROW, (self._num_rows, row.step, pattern, row.times, row.body))]
        for time, name, scopes, bands in row.histograms:
            columns = row.step, time, storable(name), interning.scopes(scopes)
            items += [(INSERT_DISTRIBUTION, (*columns, *band)) for band in bands]
        self._num_rows += 1
        return [*interning.news(), *items]
