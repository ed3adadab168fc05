"""Histograms and rows by plain numpy, one value at a time where it matters."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from forewarn.types import Counts


def histogram(values: Any) -> tuple[Counts, Counts]:
    """Counts [1 × 2 × 64] and zeros [1] of the finite values."""
    values = np.asarray(values, np.float64).reshape(-1)
    values = values[np.isfinite(values)]
    counts = np.zeros((1, 2, 64), np.int64)
    for sign, part in enumerate((values[values < 0], values[values > 0])):
        bins = np.clip(np.floor(np.log2(np.abs(part))) + 40, 0, 63).astype(int)
        counts[0, sign] = np.bincount(bins, minlength=64)
    return counts, np.array([(values == 0).sum()])


def row(values: Any) -> NDArray[np.float64]:
    """The row of the engine: count, sum, sum of squares, minimum, maximum, zeros, non-finite."""
    values = np.asarray(values, np.float64).reshape(-1)
    finite = values[np.isfinite(values)]
    least, most = (finite.min(), finite.max()) if len(finite) else (np.inf, -np.inf)
    moments = [finite.sum(), (finite * finite).sum(), least, most]
    return np.array([[len(values), *moments, (finite == 0).sum(), len(values) - len(finite)]])


def ranked(values: Any, percent: int) -> float:
    """The ⌈p · n⌉-th smallest value."""
    ordered = np.sort(np.asarray(values, np.float64).reshape(-1))
    return float(ordered[-(-len(ordered) * percent // 100) - 1])
