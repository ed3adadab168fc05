"""All scopes of one metric at once, chunk by chunk."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from forewarn.store.catalog import Catalog, Layout
from forewarn.store.chunks import chunks_between, read_chunk
from forewarn.store.errors import RunError
from forewarn.store.index import Occurrences
from forewarn.store.tail import by_layout, rows_between
from forewarn.types import Values


@dataclass(frozen=True, slots=True)
class Piece:
    """Successive readings of one metric for the same scopes."""

    scopes: tuple[str, ...]
    steps: NDArray[np.int64]
    times: NDArray[np.float64]
    """Seconds since the epoch."""
    values: Values
    """As [scopes, steps]."""


def values_between(
    connection: sqlite3.Connection, catalog: Catalog, layout: Layout, places: Occurrences, wanted: NDArray[np.bool_]
) -> Iterator[tuple[int, Values]]:
    """The values [scopes, occurrences] of the chunks and the tail that hold wanted occurrences of a layout.

    Each comes with the number of its first occurrence.
    """
    rows = places.rows[wanted]
    if not len(rows):
        return
    first, end = int(rows[0]), int(rows[-1]) + 1
    in_tail = by_layout(rows_between(connection, first, end), catalog).get(layout.id)
    for chunk in chunks_between(connection, layout.id, first, end):
        yield _placed(places, chunk.first, read_chunk(connection, chunk, layout.num_scopes))
    if in_tail is not None:
        yield _placed(places, int(in_tail.rows[0]), in_tail.values.T)


def _placed(places: Occurrences, row: int, values: Values) -> tuple[int, Values]:
    begin = int(np.searchsorted(places.rows, row))
    if begin + values.shape[1] > len(places.rows):
        raise RunError("values are damaged: there are more of them than steps")
    return begin, values
