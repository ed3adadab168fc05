"""The bounds of the rules about what an epoch brought."""

from __future__ import annotations

from dataclasses import dataclass

from forewarn.settings import Settings, between


@dataclass(frozen=True, slots=True, kw_only=True)
class Overfitting(Settings):
    """E101."""

    gap: float = between(0.3, 0.0)
    """Share of the training loss by which the validation loss must lie above it: a severe gap."""
    training_gain: float = between(0.05, 0.0, 1.0)
    """Improvement of the training loss over the epoch at or above which it still learns."""
    improvement: float = between(0.0, 0.0, 1.0)
    """Improvement of the validation loss on its best up to which it does not."""
    negligible_share: float = between(0.05, 0.0, 1.0)
    """Share of the highest loss below which a validation loss is near zero: a solved task has large gaps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowImprovement(Settings):
    """E102."""

    improvement: float = between(0.01, 0.0, 1.0)
    """Improvement of the validation loss over the epoch below which it is poor; as large a rise is no stall."""
    training_gain: float = between(0.05, 0.0, 1.0)
    """Improvement of the training loss over the epoch below which it stalls as well."""
    earlier_gain: float = between(0.15, 0.0, 1.0)
    """Improvement of the validation loss in one of the epochs before above which it had been fast."""
    epochs: int = between(5, 1)
    """Epochs before this one among which that must have been."""
    decayed_share: float = between(0.5, 0.0, 1.0)
    """Share of its peak below which the lr counts as decayed: to lower it further helps no more."""
    negligible_share: float = between(0.05, 0.0, 1.0)
    """Share of the highest loss below which there is nothing left to gain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationPlateau(Settings):
    """E103."""

    change: float = between(0.01, 0.0, 1.0)
    """Change of the validation loss from one epoch to the next below which it stands still."""
    window: int = between(3, 2)
    """Epochs in a row that must stand still."""
    steps: int = between(10_000, 1)
    """Steps without a new best after which it counts as a plateau, whatever the epochs."""
    decayed_share: float = between(0.5, 0.0, 1.0)
    """Share of its peak below which the lr counts as decayed: a plateau is information then."""
    negligible_share: float = between(0.05, 0.0, 1.0)
    """Share of the highest loss below which there is nothing left to gain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationRising(Settings):
    """E104."""

    rise: float = between(0.1, 0.0)
    """Share of its best by which the validation loss must lie above it."""
    lasting: int = between(2, 1)
    """Evaluations in a row after which it is a warning; a single one is information."""
    negligible_share: float = between(0.05, 0.0, 1.0)
    """Share of the highest loss below which a validation loss is near zero: it rises by large factors there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Underfitting(Settings):
    """E105."""

    gap: float = between(0.1, 0.0)
    """Share of the training loss that the validation loss may lie above it."""
    training_gain: float = between(0.1, 0.0, 1.0)
    """Improvement of the training loss that no epoch so far has reached."""
    epochs: int = between(3, 2)
    """Epochs that must have been seen before anything is judged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstEpochFlat(Settings):
    """E106."""

    gain: float = between(0.02, 0.0, 1.0)
    """Share of its level at the start of the run that the loss must have lost by the end of an epoch."""
    rise: float = between(0.05, 0.0)
    """Share of that level that it may have risen by: more is no standstill."""
    steps: int = between(200, 1)
    """Steps of the run before anything is judged: some models take a hundred to find their first direction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstEpochSpike(Settings):
    """E107."""

    factor: float = between(1.2, 1.0)
    """Times the loss at the start of the run that no 16 losses in a row may lie above, by their median."""
    recovery: float = between(0.05, 0.0, 1.0)
    """Share of that loss that must be won by the end of the epoch for it to be information."""
    critical_factor: float = between(3.0, 1.0)
    """Times that loss above which the end of the epoch is critical."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleMismatch(Settings):
    """E108."""

    tolerance: float = between(0.2, 0.0)
    """Share by which the declared number of steps may differ from that which the epochs will take."""
    floor: float = between(0.01, 0.0, 1.0)
    """Share of its peak at or below which the lr has come to its end."""
    left: float = between(0.2, 0.0, 1.0)
    """Share of the run that must still be ahead for that to be too early."""
    open_end: float = between(0.5, 0.0, 1.0)
    """Share of its peak above which an lr that decays has not come to its end with the run."""
