"""Histograms in the database: those of some scopes at one step are one blob, packed by the thread that writes.

Scopes are cut into bands, so that the histograms of one tensor over a whole run are read without those of all others.
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forewarn.histograms import NUM_BINS
from forewarn.store.blobs import packed, unpacked
from forewarn.types import Counts

INSERT_DISTRIBUTION = (
    "INSERT INTO distributions (step, time, name, scopes, first, count, body) VALUES (?, ?, ?, ?, ?, ?, packed(?, ?))"
)


@dataclass(frozen=True, slots=True)
class StoredHistograms:
    """The histograms of one metric of one scope over the whole run, in the order in which they were recorded."""

    steps: NDArray[np.int64]
    times: NDArray[np.float64]
    """Seconds since the epoch."""
    counts: Counts
    """[steps × 2 × 64]: negative and positive values by the power of two of their magnitude."""
    zeros: Counts
    """[steps]: values that are exactly zero."""

    def __len__(self) -> int:
        return len(self.steps)


def teach_packing(connection: sqlite3.Connection) -> None:
    """Let statements pack: whoever hands a statement over does not wait for it."""
    connection.create_function("packed", 2, packed, deterministic=True)


def names_in(connection: sqlite3.Connection) -> dict[str, list[int]]:
    """The metrics that have histograms, each with the numbers of its tuples of scopes, in the order of appearance."""
    if not _has_table(connection):
        return {}
    found: dict[str, list[int]] = {}
    for name, scopes in connection.execute(
        "SELECT name, scopes FROM distributions GROUP BY name, scopes ORDER BY min(id)"
    ):
        found.setdefault(name, []).append(scopes)
    return found


def histograms_of(connection: sqlite3.Connection, name: str, places: dict[int, int]) -> StoredHistograms:
    """The histograms of one scope; `places` says where it stands in each tuple of scopes that has it."""
    rows: list[tuple[Any, ...]] = []
    for scopes, place in places.items():
        rows += connection.execute(
            "SELECT id, step, time, first, count, body, ? FROM distributions"
            " WHERE name = ? AND scopes = ? AND first <= ? AND first + count > ?",
            [place, name, scopes, place, place],
        ).fetchall()
    rows.sort()
    found = [(step, time, *unpacked(body, count, place - first)) for _, step, time, first, count, body, place in rows]
    found = [one for one in found if one[3] or one[2].any()]  # a tensor that had none at a step is not there
    return StoredHistograms(
        np.array([one[0] for one in found], np.int64),
        np.array([one[1] for one in found], np.float64),
        np.array([one[2] for one in found], np.int64).reshape(len(found), 2, NUM_BINS),
        np.array([one[3] for one in found], np.int64),
    )


def _has_table(connection: sqlite3.Connection) -> bool:
    """Runs that were begun before there were histograms have no place for them."""
    return bool(connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'distributions'").fetchone())
