"""The bounds of the rules about the training loss."""

from __future__ import annotations

from dataclasses import dataclass

from forewarn.settings import Settings, between
from forewarn.thresholds.spike import Spike


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSpike(Spike):
    """L102."""

    warning_factor: float = between(10.0, 1.0)
    """Times the recent level at which a single step is a warning."""
    critical_factor: float = between(100.0, 1.0)
    """Times the recent level at which a single step is critical."""
    lasting_steps: int = between(3, 1)
    """Steps in a row after which a spike of any height is a warning."""
    lost_steps: int = between(20, 1)
    """Steps in a row after which the loss counts as not coming back: critical."""
    negligible_share: float = between(0.2, 0.0, 1.0)
    """Share of the highest loss so far below which a spike is information: a solved task jumps by large factors."""
    rounding: float = between(0.01, 0.0, 1.0)
    """Share of its level that a loss below zero is taken to have fallen at least: bfloat16 alone moves it so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossDivergence(Settings):
    """L103."""

    window: int = between(32, 8)
    """Steps whose median is the present level; it must have risen from window to window, twice, and within the last."""
    slow_window: int = between(128, 8)
    """The same for a rise that is too slow to be told from noise within the shorter windows."""
    significance: float = between(3.0, 0.0)
    """Standard errors of the median by which each of these rises must exceed the noise; within a window, half of it."""
    factor: float = between(1.5, 1.0)
    """Times the best earlier level above which a rising loss is a warning."""
    critical_factor: float = between(3.0, 1.0)
    """Times the best earlier level above which it is critical."""
    comparable_lr: float = between(0.5, 0.0, 1.0)
    """Share of the present lr that an earlier level must have been reached with, unless the present lr is a peak."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossPlateau(Settings):
    """L104."""

    gain: float = between(0.01, 0.0, 1.0)
    """Share of its level that the loss must have lost over the second half of the run; less for a part of that half."""
    significance: float = between(2.0, 0.0)
    """Standard errors of the slope by which even the steepest likely fall must stay below that."""
    levels: int = between(12, 4)
    """Levels of the loss that the second half must hold before anything is judged; one is the median of 32 steps."""
    decayed_share: float = between(0.3, 0.0, 1.0)
    """Share of its peak below which the lr counts as decayed: the loss may flatten then."""
    negligible_share: float = between(0.05, 0.0, 1.0)
    """Share of its highest level below which a loss is near zero, and there is nothing left to gain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossNotStarting(Settings):
    """L105."""

    gain: float = between(0.02, 0.0, 1.0)
    """Share of its first value that the loss must have lost."""
    significance: float = between(2.0, 0.0)
    """Standard errors of the slope by which even the steepest likely fall must stay below that."""
    levels: int = between(12, 4)
    """Levels of the loss before anything is judged; one is the median of 32 steps."""
    settled_steps: int = between(256, 1)
    """Steps for which the lr must not have risen: a warm-up is waited for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossBouncing(Settings):
    """L106."""

    steps: int = between(256, 32)
    """Steps that are looked at."""
    correlation: float = between(0.3, 0.0, 1.0)
    """Correlation of the loss with that of the step before, of either sign, from which it is no noise of batches."""
    spread: float = between(0.1, 0.0)
    """Robust standard deviation, as a share of the level, above which it bounces."""
    gain: float = between(0.05, 0.0, 1.0)
    """Share by which the later half of the steps must lie below the earlier one for the loss to make progress."""
    negligible_share: float = between(0.05, 0.0, 1.0)
    """Share of the highest level of the run below which bouncing does not matter."""
    warning_share: float = between(0.5, 0.0, 1.0)
    """Share of the highest level from which it is a warning: much lower, the order of the data may be the reason."""
