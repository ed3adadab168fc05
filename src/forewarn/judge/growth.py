"""Whether a magnitude is too large, or on its way there."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from forewarn.judge.series import Bools
from forewarn.settings import Settings, between
from forewarn.types import Severity, Values


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitGrowth(Settings):
    """When a magnitude is too large, or growing fast."""

    limit: float = between(100.0, 0.0)
    """Magnitude at which to warn: bfloat16 tells logits of this size apart in steps of 0.5, a factor of 1.6."""
    growing_limit: float = between(50.0, 0.0)
    """Magnitude at which to warn if it is still growing."""
    growth: float = between(1.5, 1.0)
    """Multiple of the oldest check in the window from which it counts as growing."""
    window: int = between(16, 2, counts="readings")
    """Number of checks over which growth is judged."""
    critical: float = between(1e4, 0.0)
    """Magnitude that is critical: runs with larger attention logits have diverged (Wortsman 2023)."""


def too_large(magnitudes: Values, settings: LogitGrowth) -> Bools:
    """Which scopes of [checks × scopes] exceed the limit now, or the lower limit while still growing."""
    now, before = magnitudes[-1], magnitudes[-settings.window :][0]
    growing = (now > settings.growing_limit) & (now / np.float32(settings.growth) >= before)
    large: Bools = (now > settings.limit) | growing
    return large


def severity_of(magnitude: float, settings: LogitGrowth) -> Severity:
    return Severity.CRITICAL if magnitude >= settings.critical else Severity.WARNING
