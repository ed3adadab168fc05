"""What every backend of the statistics engine gives: rows of sums, and histograms."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

COLUMNS = ("count", "sum", "sum_squares", "min", "max", "zeros", "nonfinite")
"""What a row holds: over the finite values, except `count` (all), `zeros` and `nonfinite` (the others)."""

MOMENTS = (*COLUMNS, "sum_cubes", "sum_fourths")
"""What the row of a layer's output holds: that of a tensor, and what the shape of its distribution takes."""

NUM_BINS = 64
LOWEST_EXPONENT = -40
"""Bin b of a histogram counts magnitudes in [2^(b − 40), 2^(b − 39)); the first and the last take what lies beyond."""

Numbers = Tensor | NDArray[np.float64] | NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Measurement:
    """What a backend says about many tensors; still on their devices, one part per backend and device."""

    order: tuple[int, ...]
    """Which input each row belongs to, over all parts."""
    rows: tuple[Numbers, ...]
    """[n × columns] each, in double precision. Rows of parts of a tensor add up to the row of the whole."""
    histograms: tuple[Numbers, ...] = ()
    """[n × 2 × bins] each: counts of negative and of positive values by the power of two of their magnitude."""
