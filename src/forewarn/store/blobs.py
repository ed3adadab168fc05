"""Histograms as bytes: one blob holds those of several scopes at one step.

A blob holds only the bins from the first to the last nonzero one. Each count takes as few bytes as the largest needs.
The low bytes of all counts come first, then the next bytes, so similar bytes lie together. Most of these bytes are zero
and are left out: a bitmap marks the nonzero ones, and its own zero bytes are left out in the same way. The result is
almost as small as with a general compressor, in a fraction of the time.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from forewarn.histograms import NUM_BINS
from forewarn.store.errors import RunError
from forewarn.types import Counts, Distribution

_BAND_BYTES = 16 << 10
"""Bytes scanned to read one histogram. A larger band is slower to read, a smaller one slower to write."""

_KIND = 1
_HEADER = struct.Struct("<BBBB")
"""The kind of the blob, the first bin, the number of bins, the bytes of a count."""
_CHECKSUM = struct.Struct("<I")
_MOST_BYTES = 1 << 20
"""Maximum bytes of counts in a blob; the largest one ever written had 66 KB."""

_ZLIB = 0x78
"""First byte of a blob of format 1, which is a zlib stream of all bytes, zeros included."""
_HEADER_OF_FORMAT_1 = struct.Struct("<BBB")
"""The same header without the kind."""

Bytes = NDArray[np.uint8]


def bands(distribution: Distribution) -> Iterator[tuple[int, int, bytes, memoryview]]:
    """For each blob, its first scope, its number of scopes, and the header and counts for `packed`."""
    counts, zeros = distribution.counts, distribution.zeros
    num_scopes = len(distribution.scopes)
    if counts.shape != (num_scopes, 2, NUM_BINS) or zeros.shape != (num_scopes,):
        raise ValueError(
            f"{distribution.name} of step {distribution.step} has counts of shape {counts.shape} and zeros of shape"
            f" {zeros.shape} for {num_scopes} scopes; ({num_scopes}, 2, {NUM_BINS}) and ({num_scopes},) are expected"
        )
    # One pass over all bits finds both the bins in use and the bytes that the largest count needs.
    bits = np.bitwise_or.reduce(counts.reshape(num_scopes, 2 * NUM_BINS), axis=0)
    used = np.flatnonzero(bits) % NUM_BINS
    bins = slice(int(used.min()), int(used.max()) + 1) if len(used) else slice(0, 0)
    width = bins.stop - bins.start
    size = _bytes_for(int(np.bitwise_or.reduce(bits)) | int(np.bitwise_or.reduce(zeros)))
    table = np.empty((num_scopes, 2 * width + 1), f"<u{size}")
    table[:, : 2 * width].reshape(num_scopes, 2, width)[:] = counts[:, :, bins]
    table[:, -1] = zeros
    header = _HEADER.pack(_KIND, bins.start, width, size)
    num_bands = max(1, math.ceil(table.nbytes / _BAND_BYTES))
    stride = max(1, math.ceil(num_scopes / num_bands))
    for first in range(0, num_scopes, stride):
        band = table[first : first + stride]
        yield first, len(band), header, band.data


def packed(header: bytes, counts: bytes) -> bytes:
    """The blob of a band."""
    size = header[-1]
    planes = np.frombuffer(counts, np.uint8).reshape(-1, size).T.reshape(-1)
    places, kept = _without_zeros(planes)
    places_of_places, kept_places = _without_zeros(places)
    blob = b"".join([header, places_of_places.data, kept_places.data, kept.data])
    return blob + _CHECKSUM.pack(zlib.adler32(blob))


def unpacked(blob: bytes, num_scopes: int, place: int) -> tuple[Counts, int]:
    """The counts and zeros of the scope at `place` in a blob. Raises RunError if the blob is damaged."""
    try:
        if not 0 <= place < num_scopes:
            raise ValueError(f"it is not of {num_scopes} scopes")
        find = _row_of_format_1 if blob[0] == _ZLIB else _row
        lowest, planes = find(blob, num_scopes, place)
        numbers = np.ascontiguousarray(planes.T).view(f"<u{len(planes)}").reshape(-1)
        width = len(numbers) // 2
        counts = np.zeros((2, NUM_BINS), np.int64)
        counts[:, lowest : lowest + width] = numbers[:-1].reshape(2, width)
        return counts, int(numbers[-1])
    except (TypeError, ValueError, IndexError, struct.error, zlib.error) as error:
        raise RunError(f"a histogram is damaged ({error})") from error


def _row(blob: bytes, num_scopes: int, place: int) -> tuple[int, Bytes]:
    """The first bin, and the bytes of one scope by significance. Other scopes are skipped, not decoded."""
    kind, lowest, width, size = _HEADER.unpack_from(blob)
    end = len(blob) - _CHECKSUM.size
    if kind != _KIND or _CHECKSUM.unpack_from(blob, end) != (zlib.adler32(blob[:end]),):
        raise ValueError("its checksum does not match")
    stored = np.frombuffer(blob, np.uint8)[_HEADER.size : end]
    row_bytes = 2 * width + 1
    num_bytes = _num_bytes(size, num_scopes, row_bytes)
    num_places = -(-num_bytes // 8)
    begin = -(-num_places // 8)
    if begin > len(stored):
        raise ValueError(f"it is not of {num_scopes} scopes")
    places, kept = _with_zeros(np.unpackbits(stored[:begin], count=num_places).view(np.bool_), stored[begin:])
    nonzero = np.unpackbits(places, count=num_bytes).view(np.bool_)
    if np.count_nonzero(nonzero) != len(kept):
        raise ValueError(f"it is not of {num_scopes} scopes")
    planes = np.empty((size, row_bytes), np.uint8)
    for plane in range(size):
        start = (plane * num_scopes + place) * row_bytes
        planes[plane], _ = _with_zeros(nonzero[start : start + row_bytes], kept[np.count_nonzero(nonzero[:start]) :])
    return lowest, planes


def _row_of_format_1(blob: bytes, num_scopes: int, place: int) -> tuple[int, Bytes]:
    stream = zlib.decompressobj()
    lowest, width, size = _HEADER_OF_FORMAT_1.unpack(stream.decompress(blob, _HEADER_OF_FORMAT_1.size))
    num_bytes = _num_bytes(size, num_scopes, 2 * width + 1)
    plain = stream.decompress(stream.unconsumed_tail, num_bytes + 1)  # one extra byte shows that there are too many
    if len(plain) != num_bytes or not stream.eof or stream.unused_data:
        raise ValueError(f"it is not of {num_scopes} scopes")
    return lowest, np.frombuffer(plain, np.uint8).reshape(size, num_scopes, 2 * width + 1)[:, place]


def _num_bytes(size: int, num_scopes: int, row_bytes: int) -> int:
    """The bytes of counts in a blob, checked before any memory is allocated for them."""
    num_bytes = size * num_scopes * row_bytes
    if not 0 < num_bytes <= _MOST_BYTES:
        raise ValueError(f"it is not of {num_scopes} scopes")
    return num_bytes


def _without_zeros(numbers: Bytes) -> tuple[Bytes, Bytes]:
    """One bit per byte that says whether it is nonzero, and the nonzero bytes."""
    nonzero = numbers != 0
    return np.packbits(nonzero), numbers[nonzero]


def _with_zeros(nonzero: NDArray[np.bool_], stored: Bytes) -> tuple[Bytes, Bytes]:
    """The bytes with their zeros, and the rest of `stored`."""
    numbers = np.zeros(len(nonzero), np.uint8)
    num_kept = int(np.count_nonzero(nonzero))
    numbers[nonzero] = stored[:num_kept]
    return numbers, stored[num_kept:]


def _bytes_for(largest: int) -> int:
    return next(size for size in (1, 2, 4, 8) if largest < 1 << 8 * size)
