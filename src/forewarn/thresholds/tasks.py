"""The bounds of the rules about several tasks."""

from __future__ import annotations

from dataclasses import dataclass

from forewarn.settings import Settings, between


@dataclass(frozen=True, slots=True, kw_only=True)
class _TaskRatio(Settings):
    """When a ratio of two tasks' gradients is judged, and when the weaker one is left in peace."""

    window: int = between(10, 2)
    """Measured steps whose mean ratio, on a log scale, is judged; so many there must be."""
    solved: float = between(0.2, 0.0, 1.0)
    """Share of its first loss below which a weak task has learned its part, and is not neglected."""
    ahead: float = between(0.8, 0.0, 1.0)
    """The same for a weak task that has less than this share left of what the strong one has left."""
    mending: float = between(1.1, 1.0)
    """Times that its weight has risen against the strong one's where the tasks are being balanced already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskImbalance(_TaskRatio):
    """T101."""

    minor: float = between(2.0, 1.0)
    """Ratio of two tasks' gradients, either way round, above which it is information."""
    significant: float = between(3.0, 1.0)
    """The same above which it is a warning."""
    starved: float = between(5.0, 1.0)
    """The same above which it is no longer this but a collapse, which has a rule of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskCollapse(_TaskRatio):
    """T102."""

    ratio: float = between(5.0, 1.0)
    """Ratio of two tasks' gradients above which, or below one over which, the weaker one is starved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientConflict(Settings):
    """T103."""

    window: int = between(20, 2)
    """Measured steps that are judged together; so many there must be."""
    cosine: float = between(-0.4, -1.0, 0.0)
    """Mean cosine below which two tasks undo each other's steps in part: information."""
    severe: float = between(-0.6, -1.0, 0.0)
    """Mean cosine below which little is left of either: a warning."""
    negative_share: float = between(0.8, 0.0, 1.0)
    """Of the readings that must be negative for a conflict to be sustained."""
