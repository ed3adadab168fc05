"""Aggregates over all tensors: median, percentiles and counts."""

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


def gradient_aggregates(norms: NDArray[Any], vanishing: float, exploding: float) -> dict[str, float]:
    """`grad_{median,p95,min,max}` and how many tensors vanish (below `vanishing`) or explode (above `exploding`)."""
    numbers = {f"grad_{name}": value for name, value in spread(norms).items()}
    with np.errstate(invalid="ignore"):
        numbers["vanishing_count"] = float((norms < vanishing).sum())
        numbers["exploding_count"] = float((norms > exploding).sum())
    return numbers


def update_aggregates(ratios: NDArray[Any], frozen: NDArray[np.bool_]) -> dict[str, float]:
    """`update_ratio_{median,p95,min,max}` and how many tensors are frozen."""
    numbers = {f"update_ratio_{name}": value for name, value in spread(ratios).items()}
    return {**numbers, "frozen_count": float(frozen.sum())}
