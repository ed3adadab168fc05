"""An exponential moving average."""

from __future__ import annotations

import math


class Ema:
    """`ema = decay · ema + (1 − decay) · value`; the first value is the first ema.

    Non-finite values are skipped: the average would never recover from one.
    """

    def __init__(self, decay: float, value: float = math.nan) -> None:
        self.decay = decay
        self.value = value
        """NaN until the first finite value."""

    def update(self, value: float) -> float:
        """Add one value and return the average."""
        if math.isfinite(value):
            started = not math.isnan(self.value)
            self.value = self.decay * self.value + (1 - self.decay) * value if started else value
        return self.value
