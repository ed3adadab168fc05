"""The bounds of the rules about updates."""

from __future__ import annotations

from dataclasses import dataclass

from forewarn.settings import Settings, between


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenWeight(Settings):
    """U101."""

    ratio: float = between(1e-12, 0.0)
    """Update ratio at or below which a weight does not move."""
    patience: int = between(3, 1)
    """Checks in a row at or below that ratio after which it counts as frozen."""
    negligible_share: float = between(1e-6, 0.0, 1.0)
    """Share of the highest loss below which a gradient that has vanished is information: the task is solved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRatioHigh(Settings):
    """U102."""

    tensor: float = between(0.1, 0.0)
    """Update ratio of one tensor above which it is rewritten rather than trained."""
    median: float = between(3e-2, 0.0)
    """Median update ratio over tensors at or above which the learning rate is too high."""
    start_steps: int = between(100, 0)
    """For so many steps the bounds are wider: weights start small, and Adam's first steps are its largest."""
    start_ratio: float = between(0.2, 0.0)
    """Both bounds in that time."""
    near_zero_ratio: float = between(10.0, 0.0)
    """A tensor whose very first ratio is above this starts near zero, and is left alone in that time."""
    learning: float = between(0.2, 0.0, 1.0)
    """Share of the first loss that, once it is gained, leaves everything alone in that time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRatioLow(Settings):
    """U103."""

    tensor: float = between(1e-7, 0.0)
    """Update ratio of one tensor below which (and above frozen) it barely trains."""
    negligible_share: float = between(1e-6, 0.0, 1.0)
    """Share of the highest loss below which that is information: the task is solved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRatioJump(Settings):
    """U104."""

    factor: float = between(3.0, 1.0)
    """Times the median of the window."""
    window: int = between(20, 3)
    """Checks whose median is the level."""
    minimum: int = between(8, 2)
    """Checks that must have been seen before anything is judged."""
    warning_factor: float = between(10.0, 1.0)
    """Times the level at which a single check is a warning, whatever the cause; a jump of the lr always is."""
    lasting_checks: int = between(3, 1)
    """Checks in a row after which a jump of any height is a warning."""
    restart_tolerance: float = between(0.01, 0.0)
    """An lr that jumps to within this share of its earlier peak is a restart by plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerNotStepping(Settings):
    """U105."""

    steps: int = between(3, 1)
    """Calls of `monitor.step` in a row without an optimizer step."""
    skipped_steps: int = between(20, 1)
    """Steps skipped by the gradient scaler in a row; a few are how it finds its scale."""
