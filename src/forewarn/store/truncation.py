"""Cutting a run off at a step, so that a resumed run continues seamlessly."""

from __future__ import annotations

import sqlite3
from contextlib import nullcontext

import numpy as np

from forewarn.store.catalog import Catalog
from forewarn.store.chunks import chunks_between, delete_chunk, read_chunk, write_chunk
from forewarn.store.columns import TIMES, Columns, packed
from forewarn.store.database import transaction
from forewarn.store.index import Index, compacted, occurrences, with_tail
from forewarn.store.plain import encoded
from forewarn.store.replay import replay
from forewarn.store.tail import TailRow


def truncate(connection: sqlite3.Connection, step: int, now: float) -> None:
    """Delete everything recorded at `step` or later, and increment the generation.

    Rows are stored in the order they were appended, which is almost always the order of steps. A row logged late for
    an earlier step is kept and moves to the cut.
    """
    with transaction(connection):
        catalog = Catalog()
        catalog.refresh(connection)
        behind = compacted(connection, catalog, Index())
        index = with_tail(connection, catalog, behind)
        beyond = np.flatnonzero(index.steps >= step)
        cut = int(beyond[0]) if len(beyond) else len(index)
        late = _late_rows(connection, catalog, index, step, cut)
        if cut < len(behind):
            for layout in catalog.layouts:
                _cut_chunks(connection, catalog, index, layout.id, cut)
            _cut_spans(connection, index, cut)
        connection.execute("DELETE FROM tail WHERE row >= ?", [cut])
        deleted = len(index) - cut
        for table in ("distributions", "records"):
            deleted += connection.execute(f"DELETE FROM {table} WHERE step >= ?", [step]).rowcount
        connection.executemany(
            "INSERT INTO tail VALUES (?, ?, ?, ?, ?)",
            [(row.row, row.step, row.pattern, row.times, row.body) for row in late],
        )
        _forget_unused(connection, catalog, [*np.unique(index.patterns[:cut]), *(row.pattern for row in late)])
        facts = encoded({"step": step, "deleted": deleted})
        connection.execute("INSERT INTO events (time, kind, data) VALUES (?, 'resume', ?)", [now, facts])
        connection.execute("UPDATE generation SET number = number + 1")


def _late_rows(connection: sqlite3.Connection, catalog: Catalog, index: Index, step: int, cut: int) -> list[TailRow]:
    selected = index.steps < step
    selected[:cut] = False
    rows = replay(lambda: nullcontext((connection, catalog, index)), index, selected)
    late = []
    for row, (number, (its_step, blocks)) in enumerate(zip(np.flatnonzero(selected), rows, strict=True), cut):
        pattern = int(index.patterns[number])
        times = index.times_of(int(number), catalog.patterns[pattern].num_times)
        body = b"".join(block.values.tobytes() for block in blocks)
        late.append(TailRow(row, its_step, pattern, times.astype(TIMES).tobytes(), body))
    return late


def _cut_chunks(connection: sqlite3.Connection, catalog: Catalog, index: Index, layout: int, cut: int) -> None:
    num_scopes = catalog.layouts[layout].num_scopes
    for chunk in chunks_between(connection, layout, cut, len(index)):
        rows = occurrences(index, catalog, layout, chunk.first, cut).rows
        values = read_chunk(connection, chunk, num_scopes)[:, : len(rows)] if len(rows) else None
        delete_chunk(connection, chunk, num_scopes)
        if values is not None:
            write_chunk(connection, layout, chunk.first, int(rows[-1]), chunk.level, values)


def _cut_spans(connection: sqlite3.Connection, index: Index, cut: int) -> None:
    split = connection.execute("SELECT first, level FROM spans WHERE first < ? AND last >= ?", [cut, cut]).fetchone()
    connection.execute("DELETE FROM spans WHERE last >= ?", [cut])
    if split is not None:
        first, level = split
        times = index.times[slice(first, cut) if index.begins is None else slice(*index.begins[[first, cut]])]
        columns = packed(Columns(index.steps[first:cut], index.patterns[first:cut], times))
        connection.execute(
            "INSERT INTO spans VALUES (?, ?, ?, ?, ?, ?)",
            [first, cut - 1, level, *columns],
        )


def _forget_unused(connection: sqlite3.Connection, catalog: Catalog, used: list[int]) -> None:
    """Delete names that first appeared after the cut. The remaining numbers have no gap."""
    patterns = 1 + max((int(number) for number in used), default=-1)
    layouts = 1 + max((id for pattern in catalog.patterns[:patterns] for id in pattern.layouts), default=-1)
    connection.execute("DELETE FROM patterns WHERE id >= ?", [patterns])
    connection.execute("DELETE FROM layouts WHERE id >= ?", [layouts])
    connection.execute(
        "DELETE FROM scopes WHERE id NOT IN (SELECT scopes FROM layouts UNION SELECT scopes FROM distributions)"
    )
