"""The extent of a run at one moment. A reader that stops there sees that moment, however long it reads.

This needs no lock. Rows, records and events are only ever added, and compaction moves them without changing them. Only
a resume deletes some, and it leaves an event that says so.
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
        """Raises ResumedError if anything within the extent has been deleted since."""
        generation = generation_of(connection)
        if self.generation is None or generation == self.generation:
            return
        num_resumes = generation - self.generation
        resumes = connection.execute(
            "SELECT time, kind, data FROM events WHERE kind = 'resume' ORDER BY id DESC LIMIT ?", [num_resumes]
        ).fetchall()
        if len(resumes) != num_resumes or any(event_from(*row).data.get("deleted") != 0 for row in resumes):
            raise ResumedError("another process resumed it from an earlier step while it was read; read it again")


def extent_of(connection: sqlite3.Connection, num_rows: int, num_layouts: int) -> Extent:
    """The extent of the run now."""
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
