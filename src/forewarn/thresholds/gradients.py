"""The bounds of the rules about gradients, over time and over the depth."""

from __future__ import annotations

import math
from dataclasses import dataclass

from forewarn.settings import Settings, between
from forewarn.thresholds.spike import Spike


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplodingGradient(Settings):
    """G102."""

    warning: float = between(100.0, 0.0)
    """Global gradient norm before clipping at which to warn."""
    critical: float = between(1000.0, 0.0)
    """Global gradient norm before clipping that is critical."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VanishingGradient(Settings):
    """G103."""

    global_norm: float = between(1e-3, 0.0)
    """Global gradient norm below which the run as a whole is starved."""
    tensor_norm: float = between(1e-7, 0.0)
    """Gradient norm of one tensor below which (and above 0) it is starved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientSpike(Spike):
    """G104."""

    floor: float = between(math.log(2.0), 0.0)
    lasting_steps: int = between(3, 1)
    """Steps in a row after which a spike is a warning; a single one is information."""
    warning_factor: float = between(10.0, 1.0)
    """Times the recent level, after clipping, at which a single step is a warning; before it, the square of this."""
    learning: float = between(0.1, 0.0, 1.0)
    """Share by which the loss must just have fallen for larger gradients to be those of a model that learns."""
    negligible_share: float = between(0.2, 0.0, 1.0)
    """Share of the highest loss so far below which a spike is information: a solved task jumps by large factors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientFadesWithDepth(Settings):
    """G105."""

    share: float = between(0.01, 0.0, 1.0)
    """Share of the last block's gradient norm below which the first block is starved."""
    norm: float = between(1e-4, 0.0)
    """Gradient norm below which a first block is starved in absolute terms; both must hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientImbalance(Settings):
    """G106."""

    factor: float = between(100.0, 1.0)
    """Largest over smallest gradient norm among the blocks."""
    minimum: int = between(8, 1)
    """Checks that must have been seen before anything is judged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientDecay(Settings):
    """G107."""

    share: float = between(0.1, 0.0, 1.0)
    """Share of its starting level below which the global gradient norm has decayed: information."""
    warning_share: float = between(0.01, 0.0, 1.0)
    """The share at which to warn, if the loss does not fall."""
    learning: float = between(0.05, 0.0, 1.0)
    """Share by which the loss must have fallen within memory for the decay to be that of a run that learns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GainDrift(Settings):
    """G110."""

    mean_gain_drift_threshold: float = between(0.1, 0.0)
    """Share above the oldest check of the window at which the mean gain has drifted."""
    amplification: float = between(20.0, 1.0)
    """Times that gradients must grow over the whole depth for a drift to matter: a young model drifts as it learns."""
    norm_growth: float = between(3.0, 1.0)
    """Times the oldest quarter of the gradient norms in memory above which this is a warning."""
    norm: float = between(30.0, 0.0)
    """Gradient norm above which it is one in any case."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GainTooHigh(Settings):
    """G111."""

    amplification: float = between(30.0, 1.0)
    """Times that a gradient may grow from last to first block; the gain allowed to n blocks is its n-th root."""
    mean_gain_absolute_threshold: float | None = None
    """The allowed mean gain per block, instead of the one that follows from `amplification` and the depth."""
    norm_growth: float = between(3.0, 1.0)
    """Times the oldest quarter of the gradient norms in memory above which this is a warning."""
    norm: float = between(30.0, 0.0)
    """Gradient norm above which it is one in any case."""
