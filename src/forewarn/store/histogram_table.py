"""Histograms in the database: one blob per group of scopes and step, packed by the writer thread.

Scopes are stored in bands, so the histograms of one tensor can be read without those of all others.
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
    """The histograms of one metric and scope over the whole run, in the order they were recorded."""

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
    """Let statements call `packed`, so that packing happens on the writer thread."""
    connection.create_function("packed", 2, packed, deterministic=True)


def names_in(connection: sqlite3.Connection, last: int) -> dict[str, list[int]]:
    """The metrics with histograms, and the numbers of the scope tuples of each, in order of appearance.

    `last` is the number of the last blob to look at.
    """
    if not has_table(connection):
        return {}
    numbers: dict[str, list[int]] = {}
    for name, scopes in connection.execute(
        "SELECT name, scopes FROM distributions WHERE id <= ? GROUP BY name, scopes ORDER BY min(id)", [last]
    ):
        numbers.setdefault(name, []).append(scopes)
    return numbers


def histograms_of(connection: sqlite3.Connection, name: str, places: dict[int, int], last: int) -> StoredHistograms:
    """The histograms of one scope up to blob `last`; `places` is its position in each tuple that contains it."""
    rows: list[tuple[Any, ...]] = []
    for scopes, place in places.items():
        rows += connection.execute(
            "SELECT id, step, time, first, count, body, ? FROM distributions"
            " WHERE name = ? AND scopes = ? AND first <= ? AND first + count > ? AND id <= ?",
            [place, name, scopes, place, place, last],
        ).fetchall()
    rows.sort()
    entries = [(step, time, *unpacked(body, count, place - first)) for _, step, time, first, count, body, place in rows]
    entries = [entry for entry in entries if entry[3] or entry[2].any()]  # empty where a step had no histogram
    return StoredHistograms(
        np.array([entry[0] for entry in entries], np.int64),
        np.array([entry[1] for entry in entries], np.float64),
        np.array([entry[2] for entry in entries], np.int64).reshape(len(entries), 2, NUM_BINS),
        np.array([entry[3] for entry in entries], np.int64),
    )


def has_table(connection: sqlite3.Connection) -> bool:
    """Whether the run has a table of histograms; older runs do not."""
    return bool(connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'distributions'").fetchone())
