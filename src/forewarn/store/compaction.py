"""Turning the tail round: from one blob per row to one span for all and a chunk per layout."""

from __future__ import annotations

import sqlite3

import numpy as np

from forewarn.store.catalog import Catalog
from forewarn.store.chunks import write_chunk
from forewarn.store.columns import MOST_ROWS, PATTERNS, STEPS, TIMES, Columns, packed
from forewarn.store.database import transaction
from forewarn.store.tail import by_layout, oldest_rows

TAIL_ROWS = 256
"""So many rows at least make a chunk, unless they are very wide or the run ends."""

TAIL_BYTES = 16 << 20
"""The tail is compacted at this size even if it has fewer rows: this bounds the memory that compaction takes."""


def compact(connection: sqlite3.Connection, catalog: Catalog) -> bool:
    """Move the oldest rows of the tail, up to `TAIL_BYTES`, behind it; False if there were none.

    Readers see either all of it or nothing. No value is touched one by one: the work is numpy's and SQLite's,
    which leave the interpreter to the training.
    """
    with transaction(connection):
        catalog.refresh(connection)
        rows = oldest_rows(connection, TAIL_BYTES, MOST_ROWS)
        if not rows:
            return False
        # Deleting first lets the chunks reuse the pages of the tail: the file does not grow by compaction.
        connection.execute("DELETE FROM tail WHERE row <= ?", [rows[-1].row])
        connection.execute(
            "INSERT INTO spans VALUES (?, ?, 0, ?, ?, ?)",
            [
                rows[0].row,
                rows[-1].row,
                *packed(
                    Columns(
                        np.array([one.step for one in rows], STEPS),
                        np.array([one.pattern for one in rows], PATTERNS),
                        np.frombuffer(b"".join(one.times for one in rows), TIMES),
                    )
                ),
            ],
        )
        for layout, found in by_layout(rows, catalog).items():
            write_chunk(connection, layout, int(found.rows[0]), int(found.rows[-1]), 0, found.values.T)
    return True
