"""Histograms in the database: those of some scopes at one step are one blob, compressed by the thread that writes.

A blob holds only the range of bins in which anything was counted, in as few bytes per count as the largest needs; the
low bytes of all counts come first, then the next ones: what is alike lies together. Scopes are cut into bands, so that
the histograms of one tensor over a whole run are read without those of all the others.
"""

from __future__ import annotations

import sqlite3
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forewarn.distributions import NUM_BINS, used_bins
from forewarn.store.errors import RunError
from forewarn.types import Counts, Distribution

INSERT_DISTRIBUTION = (
    "INSERT INTO distributions (step, time, name, scopes, first, count, body) VALUES (?, ?, ?, ?, ?, ?, compressed(?))"
)

_BAND_SCOPES = 64
_HEADER = struct.Struct("<BBB")
"""The first bin, the number of bins, the bytes of a count."""


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


def teach_compression(connection: sqlite3.Connection) -> None:
    """Let statements compress: whoever hands a statement over does not wait for it."""
    connection.create_function("compressed", 1, _compressed, deterministic=True)


def bands(distribution: Distribution) -> Iterator[tuple[int, int, bytes]]:
    """The first scope, the number of scopes and the blob, not yet compressed, of each band."""
    counts, zeros = distribution.counts, distribution.zeros
    num_scopes = len(distribution.scopes)
    if counts.shape != (num_scopes, 2, NUM_BINS) or zeros.shape != (num_scopes,):
        raise ValueError(
            f"{distribution.name} of step {distribution.step} has counts of shape {counts.shape} and zeros of shape"
            f" {zeros.shape} for {num_scopes} scopes; ({num_scopes}, 2, {NUM_BINS}) and ({num_scopes},) are expected"
        )
    bins = used_bins(counts)
    width = bins.stop - bins.start
    size = _bytes_for(max(int(counts.max(initial=0)), int(zeros.max(initial=0))))
    table = np.empty((num_scopes, 2 * width + 1), f"<u{size}")
    table[:, : 2 * width].reshape(num_scopes, 2, width)[:] = counts[:, :, bins]
    table[:, -1] = zeros
    header = _HEADER.pack(bins.start, width, size)
    for first in range(0, num_scopes, _BAND_SCOPES):
        band = table[first : first + _BAND_SCOPES]
        yield first, len(band), header + band.tobytes()


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
    found = [(step, time, *_unpacked(body, count, place - first)) for _, step, time, first, count, body, place in rows]
    found = [one for one in found if one[3] or one[2].any()]  # a tensor that had none at a step is not there
    return StoredHistograms(
        np.array([one[0] for one in found], np.int64),
        np.array([one[1] for one in found], np.float64),
        np.array([one[2] for one in found], np.int64).reshape(len(found), 2, NUM_BINS),
        np.array([one[3] for one in found], np.int64),
    )


def _compressed(plain: bytes) -> bytes:
    """A blob with the bytes of its counts sorted by their weight, compressed."""
    _, _, size = _HEADER.unpack_from(plain)
    planes = np.frombuffer(plain, np.uint8, offset=_HEADER.size).reshape(-1, size).T
    return zlib.compress(plain[: _HEADER.size] + planes.tobytes())


def _unpacked(body: bytes, num_scopes: int, place: int) -> tuple[Counts, int]:
    try:
        plain = zlib.decompress(body)
        lowest, width, size = _HEADER.unpack_from(plain)
        planes = np.frombuffer(plain, np.uint8, offset=_HEADER.size).reshape(size, num_scopes, 2 * width + 1)
        numbers = np.ascontiguousarray(planes[:, place].T).view(f"<u{size}").reshape(-1)
        counts = np.zeros((2, NUM_BINS), np.int64)
        counts[:, lowest : lowest + width] = numbers[:-1].reshape(2, width)
        return counts, int(numbers[-1])
    except (TypeError, ValueError, IndexError, struct.error, zlib.error) as error:
        raise RunError(f"a histogram is damaged ({error})") from error


def _bytes_for(largest: int) -> int:
    return next(size for size in (1, 2, 4, 8) if largest < 1 << 8 * size)


def _has_table(connection: sqlite3.Connection) -> bool:
    """Runs that were begun before there were histograms have no place for them."""
    return bool(connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'distributions'").fetchone())
