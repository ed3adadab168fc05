"""The bounds of the rules about weights."""

from __future__ import annotations

from dataclasses import dataclass

from forewarn.settings import Settings, between


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightNormSpike(Settings):
    """W102."""

    factor: float = between(10.0, 1.0)
    """Times the median of the earlier checks."""
    minimum: int = between(8, 2)
    """Earlier checks that must have been seen before anything is judged."""
    growth: float = between(2.0, 1.0)
    """Times its oldest kept norm up to which that median is a level; above, the tensor is growing into place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightNormsApart(Settings):
    """W103."""

    factor: float = between(1000.0, 1.0)
    """Largest over smallest root-mean-square weight among layers of the same kind."""
    tensors: int = between(3, 2)
    """Tensors of one kind that there must be to compare."""
    minimum: int = between(8, 2)
    """Checks that must have been seen before anything is judged."""
    growth: float = between(1.5, 1.0)
    """Times its oldest kept norm from which a small tensor counts as still growing into place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightShrinking(Settings):
    """W104."""

    share: float = between(0.1, 0.0, 1.0)
    """Share of the norm it had in the oldest kept check below which a tensor counts as shrinking away."""
    minimum: int = between(8, 2)
    """Checks that must have been seen before anything is judged."""
