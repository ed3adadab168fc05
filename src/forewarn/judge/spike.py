"""When a value is far above its recent level: shared by the rules about spikes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from forewarn.settings import Settings, between


@dataclass(frozen=True, slots=True, kw_only=True)
class Spike(Settings):
    """When a value counts as far above its recent level, by median and MAD on a log scale."""

    k: float = between(6.0, 1.0)
    """Robust standard deviations (1.4826 × MAD) above the median that make an outlier."""
    floor: float = between(0.1, 0.0)
    """Minimum excess of an outlier in natural-log units: 0.1 is 10%, ln 2 is a doubling."""
    ceiling: float = between(math.log(100.0), 0.0)
    """Excess that is always an outlier, even if the spread is wide, as when a loss falls fast."""
    window: int = between(64, 8, counts="readings")
    """Number of accepted values in the level."""
    minimum: int = between(32, 4, counts="readings")
    """Number of values needed before anything is judged."""
    readmit_after: int = between(32, 1, counts="readings")
    """Number of outliers in a row after which they become the new level."""

    def __post_init__(self) -> None:
        super(Spike, self).__post_init__()
        if self.minimum > self.window:
            raise ValueError(f"Spike.minimum ({self.minimum}) must not exceed Spike.window ({self.window})")
        if self.floor > self.ceiling:
            raise ValueError(f"Spike.floor ({self.floor:g}) must not exceed Spike.ceiling ({self.ceiling:g})")

    @property
    def key(self) -> tuple[float, ...]:
        """The numbers that make a baseline what it is: rules that agree on them share one."""
        return (self.k, self.floor, self.ceiling, self.window, self.minimum, self.readmit_after)

    @staticmethod
    def from_key(key: Sequence[float]) -> Spike:
        k, floor, ceiling, *counts = key
        window, minimum, readmit_after = map(int, counts)
        return Spike(k=k, floor=floor, ceiling=ceiling, window=window, minimum=minimum, readmit_after=readmit_after)
