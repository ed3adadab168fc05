"""Aggregates over all tensors: median, percentiles and counts."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray


def spread(values: NDArray[Any], prefix: str = "") -> dict[str, float]:
    """Median, 95th percentile (nearest rank), minimum and maximum of the finite values; NaN if there are none."""
    finite = np.sort(values[np.isfinite(values)].astype(np.float64))
    if not len(finite):
        return {f"{prefix}{name}": math.nan for name in ("median", "p95", "min", "max")}
    return {
        f"{prefix}median": float(finite[(len(finite) - 1) // 2] + finite[len(finite) // 2]) / 2,
        f"{prefix}p95": float(finite[math.ceil(0.95 * len(finite)) - 1]),
        f"{prefix}min": float(finite[0]),
        f"{prefix}max": float(finite[-1]),
    }
