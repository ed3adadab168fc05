"""When a value is far above its own recent level: shared by the rules about spikes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from forewarn.settings import Settings, between


@dataclass(frozen=True, slots=True, kw_only=True)
class Spike(Settings):
    """When a value counts as far above its own recent level; judged in log space by median and MAD."""

    k: float = between(6.0, 1.0)
    """How many robust standard deviations (1.4826 × MAD) above the median."""
    floor: float = between(0.1, 0.0)
    """The least excess in natural-log units, whatever the spread: 0.1 is 10%, ln 2 is a doubling."""
    ceiling: float = between(math.log(100.0), 0.0)
    """The excess that is an outlier whatever the spread: a loss that falls fast spreads widely by its trend alone."""
    window: int = between(64, 8, counts="readings")
    """How many accepted values make the level."""
    minimum: int = between(32, 4, counts="readings")
    """How many values must have been seen before anything is judged."""
    readmit_after: int = between(32, 1, counts="readings")
    """After so many outliers in a row the new level is taken as the level."""

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
