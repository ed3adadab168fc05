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
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forewarn.distributions import NUM_BINS
from forewarn.store.errors import RunError
from forewarn.types import Counts, Distribution

INSERT_DISTRIBUTION = (
    "INSERT INTO distributions (step, time, name, scopes, first, count, body)"
    " VALUES (?, ?, ?, ?, ?, ?, compressed(?, ?))"
)

_BAND_BYTES = 24 << 10
"""About so much is unpacked to read one histogram: more is slower to read, less slower to write."""

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
    connection.create_function("compressed", 2, _compressed, deterministic=True)


def bands(distribution: Distribution) -> Iterator[tuple[int, int, bytes, memoryview]]:
    """The first scope, the number of scopes, the header and the counts, not yet compressed, of each band."""
    counts, zeros = distribution.counts, distribution.zeros
    num_scopes = len(distribution.scopes)
    if counts.shape != (num_scopes, 2, NUM_BINS) or zeros.shape != (num_scopes,):
        raise ValueError(
            f"{distribution.name} of step {distribution.step} has counts of shape {counts.shape} and zeros of shape"
            f" {zeros.shape} for {num_scopes} scopes; ({num_scopes}, 2, {NUM_BINS}) and ({num_scopes},) are expected"
        )
    # Whatever was counted sets a bit: one pass tells the bins in use and the bytes that the largest count needs.
    bits = np.bitwise_or.reduce(counts.reshape(num_scopes, 2 * NUM_BINS), axis=0)
    used = np.flatnonzero(bits) % NUM_BINS
    bins = slice(int(used.min()), int(used.max()) + 1) if len(used) else slice(0, 0)
    width = bins.stop - bins.start
    size = _bytes_for(int(np.bitwise_or.reduce(bits)) | int(np.bitwise_or.reduce(zeros)))
    table = np.empty((num_scopes, 2 * width + 1), f"<u{size}")
    table[:, : 2 * width].reshape(num_scopes, 2, width)[:] = counts[:, :, bins]
    table[:, -1] = zeros
    header = _HEADER.pack(bins.start, width, size)
    num_bands = -(-table.nbytes // _BAND_BYTES)
    for first, end in pairwise(num_scopes * at // num_bands for at in range(num_bands + 1)):
        band = table[first:end]
        yield first, len(band), header, band.data


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


def _compressed(header: bytes, counts: bytes) -> bytes:
    """A blob: the header and the bytes of the counts sorted by their weight, compressed."""
    size = header[-1]
    planes = counts if size == 1 else np.frombuffer(counts, np.uint8).reshape(-1, size).T.tobytes()
    # Looking for runs of one byte only takes a third of the time of the usual search, for almost the same size.
    coder = zlib.compressobj(1, strategy=zlib.Z_RLE)
    return coder.compress(header) + coder.compress(planes) + coder.flush()


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
