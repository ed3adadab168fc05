"""Mean, norm and other readable quantities from the engine's rows of sums."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from forewarn.types import Values

QUANTITIES = ("norm", "mean", "std", "min", "max", "zero_fraction", "nonfinite")


def summarize(rows: NDArray[np.float64]) -> dict[str, Values]:
    """The quantities of each row [n × columns]; NaN where there was nothing to measure.

    Norm, mean, std, min and max are those of the finite values; `nonfinite` says how many others there are.
    """
    with np.errstate(all="ignore"):
        count, total, squares, least, most, zeros, nonfinite = rows.T
        finite = count - nonfinite
        mean = total / finite
        spread = np.sqrt(np.maximum(squares / finite - mean * mean, 0.0))
        quantities: dict[str, Any] = {
            "norm": np.sqrt(squares),
            "mean": mean,
            "std": spread,
            "min": np.where(finite > 0, least, np.nan),
            "max": np.where(finite > 0, most, np.nan),
            "zero_fraction": zeros / count,
            "nonfinite": nonfinite,
        }
        return {name: quantities[name].astype(np.float32) for name in QUANTITIES}


def rescale(rows: NDArray[np.float64], scale: float) -> NDArray[np.float64]:
    """The rows of the same tensors divided by `scale`."""
    divided: NDArray[np.float64] = rows / np.array([1.0, scale, scale * scale, scale, scale, 1.0, 1.0])
    return divided
