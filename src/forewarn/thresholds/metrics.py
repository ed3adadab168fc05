"""The bounds of the rules about metrics of the user's own."""

from __future__ import annotations

from dataclasses import dataclass

from forewarn.settings import Settings, between


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricJump(Settings):
    """M103."""

    minimum: int = between(30, 4)
    """Readings of a metric at one place before anything is judged; `Config.detail_window` is how many are kept."""
    spans: float = between(5.0, 0.0)
    """How far outside all earlier readings, in units of the whole range that they cover."""
    share: float = between(0.5, 0.0)
    """The same at least, as a share of their largest magnitude: one that hardly varies may vary a little more."""
    lasting: int = between(2, 1)
    """Readings in a row that must lie there, on the same side."""
