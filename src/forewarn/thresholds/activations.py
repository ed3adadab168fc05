"""The bounds of the rules about activations, attention, logits and routers."""

from __future__ import annotations

from dataclasses import dataclass

from forewarn.settings import Settings, between


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadUnits(Settings):
    """A101."""

    share: float = between(0.5, 0.0, 1.0)
    """Share of the units of a layer that are dead at which to warn."""
    critical: float = between(0.99, 0.0, 1.0)
    """The share that is critical: nothing passes through the layer any more."""
    window: int = between(10, 1)
    """Measured steps in a row on which a unit must have been zero everywhere to count as dead."""
    positions: int = between(256, 1)
    """Positions (tokens, pixels, samples) that it must have been read at in that time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaturatedUnits(Settings):
    """A102."""

    share: float = between(0.5, 0.0, 1.0)
    """Share of the units of a layer, or of the rows of a softmax, that are saturated at which to warn."""
    level: float = between(0.99, 0.5, 1.0)
    """Share of its range beyond which an output is saturated: a tanh above 0.99, a sigmoid below 0.01."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplodingActivation(Settings):
    """A103."""

    magnitude: float = between(3e4, 0.0)
    """Largest magnitude at which to warn, whatever came before: half of what float16 can hold."""
    factor: float = between(10.0, 1.0)
    """Times the median of the earlier checks."""
    lasting_checks: int = between(2, 1)
    """Checks in a row that the growth must last for: a single batch may be absurd."""
    least: float = between(100.0, 0.0)
    """Magnitude below which no growth matters: logits of 10 after a start at 0.1 are what learning looks like."""
    minimum: int = between(8, 2)
    """Earlier checks that must have been seen before growth is judged."""
    growth: float = between(3.0, 1.0)
    """Times its oldest kept value up to which that median is a level; above, the layer is still growing into place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RepresentationCollapse(Settings):
    """A104."""

    cosine: float = between(0.999, 0.0, 1.0)
    """Mean cosine of the rows of the last hidden state at which they are all the same."""
    rank: float = between(1.05, 1.0)
    """Effective rank at or below which they differ along one line only."""
    outputs: int = between(3, 1)
    """Outputs that the last layer must have for that line to be too few: two classes need no more."""
    earlier_rank: float = between(2.0, 1.0)
    """Effective rank that there must have been before: what never had more did not collapse."""
    minimum: int = between(10, 1)
    """Checks that must have been seen before anything is judged."""
    learning: float = between(0.1, 0.0, 1.0)
    """Share by which the loss must have fallen within memory for rows on one line to be information."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionEntropyCollapse(Settings):
    """A106."""

    entropy: float = between(0.05, 0.0, 1.0)
    """Share of the largest possible entropy at or below which a head looks at one key only."""
    checks: int = between(3, 1)
    """Checks in a row at or below it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitGrowth(Settings):
    """A107."""

    limit: float = between(100.0, 0.0)
    """Magnitude at which to warn: bfloat16 tells logits of this size apart in steps of 0.5, a factor of 1.6."""
    growing_limit: float = between(50.0, 0.0)
    """Magnitude at which to warn of what is still growing."""
    growth: float = between(1.5, 1.0)
    """Times the oldest check of the window from which it counts as growing."""
    window: int = between(16, 2)
    """Checks over which growth is judged."""
    critical: float = between(1e4, 0.0)
    """Magnitude that is critical: attention logits beyond it were met in runs that then diverged (Wortsman 2023)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputLogitDrift(LogitGrowth):
    """A108."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadExpert(Settings):
    """A109."""

    share: float = between(0.02, 0.0, 1.0)
    """Share of an even load at or below which an expert is dead."""
    window: int = between(8, 1)
    """Checks over which the load is added up."""
    tokens: int = between(64, 1)
    """Tokens that an even load would have given each expert in that time, below which nothing is judged."""
