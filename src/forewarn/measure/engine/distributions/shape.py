"""The shape of a distribution, one of a few kinds, from its histogram and moments.

Exact zeros are left out, since `zero_fraction` counts them. The gradient of an embedding, for example, is zero for
every word that was not seen; its shape is that of the other values.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from forewarn.histograms import LOWEST_EXPONENT, NUM_BINS, used_bins
from forewarn.types import Counts, Shape, Values

Floats = NDArray[np.float64]

LEAST_VALUES = 100
"""Minimum number of counted values for a shape to mean anything."""
COLLAPSED_SPREAD = 1e-6
"""Standard deviation over mean below which values count as equal; a norm weight exceeds it after a few steps."""
SHIFTED_MEAN = 2.0
"""Mean, in standard deviations, from which a distribution is shifted. A half-normal has 1.3, uniform [0, 1] 1.7."""
HEAVY_KURTOSIS = 10.0
"""Kurtosis from which tails count as heavy. A normal distribution has 3, Laplace 6, Student's t with 5 degrees 9."""
CHANCE = 100.0
"""Divided by √n: how far chance may raise the kurtosis of n values; for Laplace, one standard deviation is half."""
VALLEY = 1 / 3
"""Fraction of the lower of two peaks: if the density between them falls below it, they are two modes."""
LEAST_PEAK = 0.05
"""Minimum share of all values in the bin of a peak, so that a few outliers are not a mode."""
SIGNIFICANT = 50
"""Minimum number of values in a peak, and expected in a valley if it were none: fewer may be chance."""

IN_BIN = 279 / 245
"""Fourth over squared second moment of values spread evenly over a bin, in units of its lower end."""
_WINDOW = np.arange(-8, 4)
"""The bins to search for modes, relative to that of the root mean square."""
_WIDTHS = np.exp2(np.concatenate([_WINDOW[::-1], [_WINDOW[0] + 1], _WINDOW])[:, None])
"""The widths of these bins, with the cell around zero in the middle."""


def shapes(counts: Counts, rows: Floats) -> Values:
    """The `Shape` of each tensor as a number; NaN where there are fewer than 100 values to judge.

    `counts` [n × 2 × bins] may be those of a sample. `rows` [n × columns] are the engine's, of all values: count, sum,
    sum of squares, minimum, maximum, zeros and values that are not finite.
    """
    count, total, squares, least, most, zeros, nonfinite = rows.T
    counted = counts.sum(axis=(1, 2))
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        nonzero = count - zeros - nonfinite
        mean, mean_square = total / nonzero, squares / nonzero
        spread = np.sqrt(np.maximum(mean_square - mean * mean, 0.0))
        kinds = np.full(len(counts), float(Shape.HEALTHY), np.float32)
        kinds[_kurtosis(counts, counted) > HEAVY_KURTOSIS + CHANCE / np.sqrt(counted)] = Shape.HEAVY_TAILS.value
        kinds[np.abs(mean) >= SHIFTED_MEAN * spread] = Shape.SHIFTED.value
        enough = np.flatnonzero(counted >= LEAST_VALUES)
        kinds[enough[_multi_modal(counts, counted, mean_square, enough)]] = Shape.MULTI_MODAL.value
        kinds[spread <= COLLAPSED_SPREAD * np.abs(mean)] = Shape.COLLAPSED.value
        kinds[counted < LEAST_VALUES] = np.nan
        kinds[(least == most) & (count - nonfinite >= LEAST_VALUES)] = Shape.CONSTANT.value
    return kinds


def _kurtosis(counts: Counts, counted: Counts) -> Floats:
    """The fourth moment over the squared second, about zero: distributions far from zero have another shape.

    Sums go from the smallest bin to the largest, in units of the current bin: units cancel out and nothing overflows.
    """
    bins = used_bins(counts)
    second, fourth = np.zeros(len(counts)), np.zeros(len(counts))
    for pooled in np.add(counts[:, 0, bins], counts[:, 1, bins], dtype=np.float64).T:
        second = second / 4 + pooled
        fourth = fourth / 16 + pooled
    kurtosis: Floats = IN_BIN * counted * fourth / (second * second)
    return kurtosis


def _multi_modal(counts: Counts, counted: Counts, mean_square: Floats, indices: NDArray[np.intp]) -> NDArray[np.bool_]:
    """Whether the density of a tensor has two peaks with a valley between them that chance does not explain.

    A peak lies below 4.5 times the root mean square, which its values would otherwise raise. Values far below the root
    mean square form one cell around zero.
    """
    usable = np.isfinite(mean_square) & (mean_square > 0)
    size = np.sqrt(np.where(usable, mean_square, 1.0)[indices])
    bins = np.frexp(size)[1] - 1 - LOWEST_EXPONENT + _WINDOW[:, None]
    offsets = indices * (2 * NUM_BINS) + np.clip(bins, 0, NUM_BINS - 1)
    inside = (bins >= 0) & (bins < NUM_BINS)
    flat, total = counts.reshape(-1), counted[indices]
    negative, positive = flat[offsets] * inside, flat[offsets + NUM_BINS] * inside
    around_zero = total - negative.sum(axis=0) - positive.sum(axis=0)
    cells = np.concatenate([negative[::-1], around_zero[None], positive]).astype(np.float64)
    density = cells / _WIDTHS
    peaks = density * (cells >= np.maximum(SIGNIFICANT, LEAST_PEAK * total))
    lower = np.minimum(_highest_so_far(peaks), _highest_so_far(peaks[::-1])[::-1])
    valleys: NDArray[np.bool_] = (lower * _WIDTHS >= SIGNIFICANT) & (density < VALLEY * lower)
    multi_modal: NDArray[np.bool_] = np.any(valleys, axis=0)
    return multi_modal


def _highest_so_far(peaks: Floats) -> Floats:
    """`np.maximum.accumulate` down the rows, several times as fast."""
    highest = peaks.copy()
    for row in range(1, len(highest)):
        np.maximum(highest[row], highest[row - 1], out=highest[row])
    return highest
