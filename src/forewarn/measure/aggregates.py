"""A handful of numbers that stand for all tensors."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray


def spread(values: NDArray[Any]) -> dict[str, float]:
    """Median, 95th percentile (by ceil), minimum and maximum of the finite values; NaN if there are none."""
    finite = np.sort(values[np.isfinite(values)].astype(np.float64))
    if not len(finite):
        return dict.fromkeys(("median", "p95", "min", "max"), math.nan)
    return {
        "median": float(finite[(len(finite) - 1) // 2] + finite[len(finite) // 2]) / 2,
        "p95": float(finite[math.ceil(0.95 * len(finite)) - 1]),
        "min": float(finite[0]),
        "max": float(finite[-1]),
    }
