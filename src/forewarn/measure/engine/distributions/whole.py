"""How the values of many tensors are spread, from their histograms and rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from forewarn.measure.engine.distributions.percentiles import percentiles
from forewarn.measure.engine.distributions.shape import shapes
from forewarn.types import Counts, Values

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Spread:
    """How the values of each tensor are spread."""

    percentiles: Mapping[str, Values]
    """`p01` to `p99`; NaN where nothing was counted."""
    shapes: Values
    """The `Shape` of each as a number; NaN where there are too few values to judge."""
    counts: Counts
    """[n × 2 × bins], scaled up to all values if they were sampled."""
    zeros: Counts
    """How many values are exactly zero."""


def spread_of(counts: Counts, rows: Floats) -> Spread:
    """The spread of tensors from their histograms [n × 2 × bins], maybe of a sample, and their rows [n × columns].

    The library of `forewarn.measure.engine.native` does the same in C; change both together.
    """
    scaled, zeros = whole_tensors(counts, rows)
    return Spread(percentiles(scaled, zeros, rows[:, 3], rows[:, 4]), shapes(counts, rows), scaled, zeros)


def whole_tensors(counts: Counts, rows: Floats) -> tuple[Counts, Counts]:
    """Histograms that stand for all values, scaled up from the sample, and how many values are exactly zero.

    Tensors of different sizes then add up. Where a tensor has values but none was counted, its zeros are 0 too.
    """
    zeros = np.nan_to_num(rows[:, 5])
    nonzero = np.nan_to_num(rows[:, 0] - rows[:, 6]) - zeros
    counted = counts.sum(axis=(1, 2))
    partly = np.flatnonzero((counted < nonzero) & (counted > 0))
    if len(partly):
        counts = counts.copy()
        counts[partly] = np.rint(counts[partly] * (nonzero[partly] / counted[partly])[:, None, None])
    return counts, np.where((counted == 0) & (nonzero > 0), 0, zeros).astype(np.int64)
