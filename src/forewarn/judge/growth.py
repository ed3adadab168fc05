"""Whether a magnitude is too large, or on its way there."""

from __future__ import annotations

import numpy as np

from forewarn.judge.series import Bools
from forewarn.thresholds.activations import LogitGrowth
from forewarn.types import Severity, Values


def too_large(magnitudes: Values, config: LogitGrowth) -> Bools:
    """Which scopes of [checks × scopes] are beyond the limit now, or beyond the lower one and still growing."""
    now, before = magnitudes[-1], magnitudes[-config.window :][0]
    growing = (now > config.growing_limit) & (now / np.float32(config.growth) >= before)
    large: Bools = (now > config.limit) | growing
    return large


def severity_of(magnitude: float, config: LogitGrowth) -> Severity:
    return Severity.CRITICAL if magnitude >= config.critical else Severity.WARNING
