"""The step, pattern and times of every row of a run, in order."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from forewarn.store.catalog import Catalog
from forewarn.store.columns import MOST_ROWS, PATTERNS, STEPS, TIMES, Columns, joined, unpacked
from forewarn.store.errors import RunError

_MOST_REPEATED = 1 << 22
"""Maximum occurrences of a metric that a row may hold more than once, so that they fit in memory."""
_MOST_EMPTY_ROWS = 1 << 20
"""Maximum rows without a block. They take no space, so a damaged database could claim any number of them."""


@dataclass(frozen=True, slots=True)
class Index:
    """One entry per row, 20 to 28 bytes each, so a million rows fit easily. The arrays are read-only."""

    steps: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, STEPS))
    patterns: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, PATTERNS))
    times: NDArray[np.float64] = field(default_factory=lambda: np.empty(0, TIMES))
    """The times of all rows in order. The pattern of a row says how many it has."""
    begins: NDArray[np.int64] | None = None
    """Where the times of each row begin; None if every row has exactly one."""

    def __len__(self) -> int:
        return len(self.steps)

    def until(self, row: int) -> Index:
        """The index of the rows before `row`."""
        if row >= len(self):
            return self
        last_time = row if self.begins is None else int(self.begins[row])
        begins = None if self.begins is None else self.begins[:row]
        return Index(self.steps[:row], self.patterns[:row], self.times[:last_time], begins)

    def times_of(self, row: int, num_times: int) -> NDArray[np.float64]:
        begin = row if self.begins is None else int(self.begins[row])
        return self.times[begin : begin + num_times]


@dataclass(frozen=True, slots=True)
class Occurrences:
    """Where one layout occurs, in order: the row, and the position among its blocks."""

    rows: NDArray[np.int64]
    positions: NDArray[np.int64]
    once: bool
    """Whether every row occurs only once."""


def compacted(connection: sqlite3.Connection, catalog: Catalog, earlier: Index) -> Index:
    """The index of all compacted rows. `earlier` is the result of an earlier call, so only new rows are read."""
    parts: list[Columns] = []
    after, num_empty = len(earlier), 0
    for first, last, *columns in connection.execute(
        "SELECT first, last, steps, patterns, times FROM spans WHERE last >= ? ORDER BY first", [after]
    ):
        span = unpacked(first, last, *columns)
        skipped = after - first  # a merged span may begin with rows that were read before
        if skipped < 0:
            raise RunError(f"rows {after} to {first - 1} are missing")
        if parts and skipped > 0:
            raise RunError(f"rows {first} to {after - 1} are damaged: two spans hold them")
        if _num_times(span.patterns, catalog) != len(span.times):
            raise RunError(f"rows {first} to {last} are damaged: their times do not add up")
        num_empty += max(0, len(span) - len(span.times))
        if num_empty > MOST_ROWS:  # a few bytes may stand for many empty rows
            raise RunError(f"rows {first} to {last} are damaged: these and the rows before them are empty")
        skipped_times = _num_times(span.patterns[:skipped], catalog)
        parts.append(Columns(span.steps[skipped:], span.patterns[skipped:], span.times[skipped_times:]))
        after = last + 1
        num_empty += len(span) - min(len(span), len(span.times))
        if num_empty > _MOST_EMPTY_ROWS:
            raise RunError(f"rows {first} to {last} are damaged: they are empty")
    return _extended(earlier, catalog, parts)


def with_tail(connection: sqlite3.Connection, catalog: Catalog, behind: Index) -> Index:
    """The index of all rows, including the tail."""
    rows = connection.execute("SELECT row, step, pattern, times FROM tail ORDER BY row").fetchall()
    if not rows:
        return behind
    if rows[0][0] != len(behind) or rows[-1][0] - rows[0][0] + 1 != len(rows):
        raise RunError(f"rows from {len(behind)} on are damaged: their numbers have a gap")
    try:
        steps = np.array([row[1] for row in rows], STEPS)
        patterns = np.array([row[2] for row in rows], PATTERNS)
        times = np.frombuffer(b"".join(row[3] for row in rows), TIMES)
    except (TypeError, ValueError, OverflowError) as error:
        raise RunError(f"the newest rows are damaged ({error})") from error
    if _num_times(patterns, catalog) != len(times):
        raise RunError("the newest rows are damaged: their times do not add up")
    return _extended(behind, catalog, [Columns(steps, patterns, times)])


def occurrences(index: Index, catalog: Catalog, layout: int, first: int = 0, end: int | None = None) -> Occurrences:
    """Where `layout` occurs among the rows from `first` up to, not including, `end`."""
    table = catalog.table
    members = np.flatnonzero(table.members == layout)
    counts = np.bincount(table.owners[members], minlength=len(catalog.patterns))
    patterns = index.patterns[first:end]
    everywhere, once = counts.min(initial=1) > 0, bool(counts.max(initial=0) <= 1)
    rows = np.arange(len(patterns)) if everywhere else np.flatnonzero(counts.astype(np.bool_)[patterns])
    places = table.positions[members]
    if once and (places == places[:1]).all():  # the usual case, which skips a pass over millions of rows
        return Occurrences(rows + first, np.broadcast_to(places[:1], rows.shape) if len(places) else rows, once)
    begins = (np.cumsum(counts) - counts)[patterns[rows]]
    if not once:  # a metric appended twice in one call
        repeats = counts[patterns[rows]]
        if repeats.sum() > _MOST_REPEATED:
            raise RunError(f"the database is damaged: layout {layout} occurs {repeats.sum()} times")
        rows, begins = np.repeat(rows, repeats), np.repeat(begins, repeats)
        begins += np.arange(len(rows)) - np.repeat(np.cumsum(repeats) - repeats, repeats)
    return Occurrences(rows + first, places[begins], once)


def steps_at(index: Index, places: Occurrences) -> NDArray[np.int64]:
    """The step of each occurrence."""
    return index.steps[_rows(places)]


def times_at(index: Index, catalog: Catalog, places: Occurrences) -> NDArray[np.float64]:
    """The time of each occurrence."""
    if index.begins is None:
        return index.times[_rows(places)]
    begins = index.begins[places.rows]
    shared = catalog.table.shared[index.patterns[places.rows]]
    return index.times[np.where(shared, begins, begins + places.positions)]


def _rows(places: Occurrences) -> slice | NDArray[np.int64]:
    """Consecutive rows as a slice, which avoids a copy."""
    rows = places.rows
    if places.once and len(rows) and rows[-1] - rows[0] + 1 == len(rows):
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return rows


def _num_times(patterns: NDArray[np.int32], catalog: Catalog) -> int:
    """The number of times in rows of these patterns. Raises RunError for an unknown pattern."""
    if len(patterns) and not 0 <= patterns.min() <= patterns.max() < len(catalog.patterns):
        raise RunError("the database is damaged: a row names a pattern that does not exist")
    return len(patterns) if catalog.table.one_time else int(catalog.table.num_times[patterns].sum())


def _extended(earlier: Index, catalog: Catalog, parts: list[Columns]) -> Index:
    if not parts:
        return earlier
    if len(earlier):
        parts = [Columns(earlier.steps, earlier.patterns, earlier.times), *parts]
    columns = joined(parts)
    begins = None
    if not catalog.table.one_time:
        counts = catalog.table.num_times[columns.patterns]
        begins = np.cumsum(counts) - counts
        begins.flags.writeable = False
    for column in (columns.steps, columns.patterns, columns.times):
        column.flags.writeable = False
    return Index(columns.steps, columns.patterns, columns.times, begins)
