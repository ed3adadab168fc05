"""Compacting the tail: many rows of one blob each become one span, and one chunk per layout."""

from __future__ import annotations

import sqlite3

import numpy as np

from forewarn.store.catalog import Catalog
from forewarn.store.chunks import write_chunk
from forewarn.store.columns import MOST_ROWS, PATTERNS, STEPS, TIMES, Columns, packed
from forewarn.store.database import transaction
from forewarn.store.tail import by_layout, oldest_rows

TAIL_ROWS = 256
"""Minimum rows in a chunk, unless they are very wide or the run ends."""

TAIL_BYTES = 16 << 20
"""The tail is compacted at this size even if it has fewer rows, which limits memory use."""


def compact(connection: sqlite3.Connection, catalog: Catalog) -> bool:
    """Move the oldest rows of the tail, up to `TAIL_BYTES`, into a span and chunks; False if there were none.

    Readers see all of the change or nothing. numpy and SQLite do the work, so the GIL is free for training.
    """
    with transaction(connection):
        catalog.refresh(connection)
        rows = oldest_rows(connection, TAIL_BYTES, MOST_ROWS)
        if not rows:
            return False
        # Deleting first lets the chunks reuse the pages of the tail, so compaction does not grow the file.
        connection.execute("DELETE FROM tail WHERE row <= ?", [rows[-1].row])
        connection.execute(
            "INSERT INTO spans VALUES (?, ?, 0, ?, ?, ?)",
            [
                rows[0].row,
                rows[-1].row,
                *packed(
                    Columns(
                        np.array([row.step for row in rows], STEPS),
                        np.array([row.pattern for row in rows], PATTERNS),
                        np.frombuffer(b"".join(row.times for row in rows), TIMES),
                    )
                ),
            ],
        )
        for layout, part in by_layout(rows, catalog).items():
            write_chunk(connection, layout, int(part.rows[0]), int(part.rows[-1]), 0, part.values.T)
    return True
