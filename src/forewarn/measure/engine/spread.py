"""How values are spread, computed by the native library if it is available, otherwise by numpy."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from forewarn.measure.engine import distributions, native
from forewarn.measure.engine.distributions import Spread
from forewarn.types import Counts


def spread_of(counts: Counts, rows: NDArray[np.float64]) -> Spread:
    """Percentiles, shapes and whole histograms of tensors, from their counts [n × 2 × bins] and rows [n × columns].

    Runs on the host after both have arrived; the tensors may have been read on any device.
    """
    return native.spread_of(counts, rows) if native.available() else distributions.spread_of(counts, rows)
