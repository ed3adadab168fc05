"""How far a run had come at a moment. A reader that looks no further sees that moment, however long it reads.

Nothing is locked for it: within a run rows, records and events are only added, and compaction moves them about without
a change. Only a resume deletes, and it says so.
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass

from forewarn.store.database import generation_of
from forewarn.store.errors import ResumedError
from forewarn.store.histogram_table import has_table
from forewarn.store.records import event_from

_EVERYTHING = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class Extent:
    """The number of rows and layouts, and the last number in each of the other tables."""

    generation: int | None = None
    rows: int = _EVERYTHING
    layouts: int = _EVERYTHING
    records: int = _EVERYTHING
    events: int = _EVERYTHING
    distributions: int = _EVERYTHING

    def check(self, connection: sqlite3.Connection) -> None:
        """Raises ResumedError if a part of what was there has been deleted since."""
        generation = generation_of(connection)
        if self.generation is None or generation == self.generation:
            return
        num_resumes = generation - self.generation
        resumes = connection.execute(
            "SELECT time, kind, data FROM events WHERE kind = 'resume' ORDER BY id DESC LIMIT ?", [num_resumes]
        ).fetchall()
        if len(resumes) != num_resumes or any(event_from(*row).data.get("deleted") != 0 for row in resumes):
            raise ResumedError(
                "it was resumed by another process while it was read, from an earlier step; read it again"
            )


def extent_of(connection: sqlite3.Connection, num_rows: int, num_layouts: int) -> Extent:
    """How far the run has come."""
    return Extent(
        generation=generation_of(connection),
        rows=num_rows,
        layouts=num_layouts,
        records=_last(connection, "records"),
        events=_last(connection, "events"),
        distributions=_last(connection, "distributions") if has_table(connection) else 0,
    )


def _last(connection: sqlite3.Connection, table: str) -> int:
    return int(connection.execute(f"SELECT coalesce(max(id), 0) FROM {table}").fetchone()[0])
