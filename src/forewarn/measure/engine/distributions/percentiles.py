"""Percentiles of many tensors from their histograms.

A percentile is the ⌈p · n⌉-th smallest of n values. The histogram says in which bin that value lies, so an estimate is
never off by more than a factor of two, whatever the distribution. Inside the bin, the density is extrapolated from the
neighboring bins, which is far more accurate for smooth distributions.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from forewarn.histograms import LOWEST_EXPONENT, NUM_BINS, PERCENTS, in_line, used_bins
from forewarn.types import Counts, Values

_WANTED = np.array(list(PERCENTS.values()))
_TINY = 1e-300
"""Replaces magnitudes of zero before a logarithm is taken."""
_LAST_EXPONENT = LOWEST_EXPONENT + NUM_BINS - 1
_LEAST_WIDTH = 1e-6
"""Minimum log2 width of the part of a bin between minimum and maximum."""
_EVEN = 1e-4
"""A rise below this counts as zero, because the formula divides by it."""
_HALF_LN2 = 0.34657359027997264

Floats = NDArray[np.float64]
Places = NDArray[np.int64]


def percentiles(counts: Counts, zeros: Counts, least: Floats, most: Floats) -> dict[str, Values]:
    """`p01` to `p99` of tensors whose histograms [n × 2 × bins], zeros, minimum and maximum are given.

    NaN where nothing was counted.
    """
    bins = used_bins(counts)
    line = in_line(counts[:, :, bins], zeros)
    num_cells = line.shape[1]
    ends = np.cumsum(line)
    last = ends[num_cells - 1 :: num_cells]
    before = np.concatenate([[0], last[:-1]])
    total = last - before
    ranks = (total[:, None] * _WANTED + 99) // 100 + before[:, None]
    place = np.minimum(np.searchsorted(ends, ranks), line.size - 1)
    count = np.maximum(line.reshape(-1)[place], 1)
    inside = (ranks - ends[place] + count - 0.5) / count
    outward = place - np.arange(num_cells // 2, line.size, num_cells)[:, None]  # from the zeros in the middle
    with np.errstate(invalid="ignore", over="ignore"):  # minimum and maximum of nothing are infinite
        magnitude = _magnitudes(line, place, outward, inside, count, bins.start, least, most)
        estimates = np.clip(np.sign(outward) * magnitude, least[:, None], most[:, None]).astype(np.float32)
    estimates[total == 0] = np.nan
    return dict(zip(PERCENTS, estimates.T, strict=True))


def _magnitudes(
    line: Counts,
    place: Places,
    outward: Places,
    inside: Floats,
    count: Counts,
    first_bin: int,
    least: Floats,
    most: Floats,
) -> Floats:
    """Magnitudes inside the bins at `place`, a share `inside` of the way through the values of each bin.

    `outward` is how far a bin lies from the zeros, negative on the negative side.
    """
    positive, away = outward > 0, np.abs(outward)
    exponent = (away + (first_bin - 1 + LOWEST_EXPONENT)).astype(np.float64)
    low = np.maximum(exponent, np.where(positive, *_logarithms(least, -most)))
    largest = np.where(positive, *_logarithms(most, -least))
    high = np.where(exponent < _LAST_EXPONENT, np.minimum(exponent + 1, largest), largest)
    width = np.maximum(high - low, _LEAST_WIDTH)
    rise = _rise(line, place, positive, away, count / width, width) * width
    falls = rise < 0  # read from the other end, where it rises: avoids subtracting nearly equal numbers
    distance = _distance(np.where(positive ^ falls, inside, 1 - inside), np.abs(rise))
    magnitudes: Floats = np.exp2(low + width * np.where(falls, 1 - distance, distance))
    return magnitudes


def _distance(share: Floats, rise: Floats) -> Floats:
    """How far into a bin a share of its values reaches, if log2 of the density rises by `rise` over the bin."""
    even = rise < _EVEN
    steep = np.where(even, 1.0, rise)
    return np.where(
        even,
        share + share * (1 - share) * rise * _HALF_LN2,  # first-order expansion of the other branch
        np.log2(1 + share * (np.exp2(steep) - 1)) / steep,
    )


def _logarithms(*values: Floats) -> list[Floats]:
    """log2 as columns; very small where a value is not positive."""
    return [np.log2(np.maximum(column, _TINY))[:, None] for column in values]


def _rise(
    line: Counts, place: Places, positive: NDArray[np.bool_], away: Places, density: Floats, width: Floats
) -> Floats:
    """How steeply log2 of the density rises over a bin, from its two neighbors or from the only one."""
    flat = line.reshape(-1)
    side = np.where(positive, 1, -1)
    above = flat[np.minimum(place + side, len(flat) - 1)] * (away < line.shape[1] // 2)
    below = flat[np.minimum(place - side, len(flat) - 1)] * (away > 1)
    ratio = np.where(above > 0, above, density) / np.where(below > 0, below, density)
    ratio[(above == 0) & (below == 0)] = 1.0
    two_sided = (above > 0) & (below > 0)
    rise: Floats = np.log2(ratio) * np.where(two_sided, 0.5, 2 / (1 + width))
    return rise
