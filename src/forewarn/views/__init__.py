"""Views show a run while it trains. A view receives each step after it is judged, and never changes the run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from forewarn.types import Action, Alert, Block, Distribution, RunEnd, RunStart


class View(Protocol):
    """Anything that can show steps; `watch(views=[…])` accepts any number of views."""

    def show(self, step: int, blocks: Sequence[Block], changed: Sequence[Alert], taken: Sequence[Action]) -> None:
        """Show one step: its measurements, the alerts that changed (most important first), and the actions taken."""

    def close(self) -> None:
        """The run is over."""


@runtime_checkable
class HistogramView(Protocol):
    """A view that also shows the histograms of a step, if there are any."""

    def show_histograms(self, step: int, distributions: Sequence[Distribution]) -> None:
        """Show the histograms of one step; `show` follows."""


@runtime_checkable
class BookendView(Protocol):
    """A view that also shows the beginning and the end of a run."""

    def begin(self, start: RunStart) -> None:
        """The run begins; no step has been shown yet."""

    def end(self, end: RunEnd) -> None:
        """The run has ended; `close` follows."""


@runtime_checkable
class DeliveringView(Protocol):
    """A view that sends alerts elsewhere, which may fail."""

    undelivered: str
    """What was not delivered, and why; empty if everything was."""


@runtime_checkable
class TrackingView(Protocol):
    """A view that writes to a tracker, which may be slow or down."""

    unsent: str
    """Why not everything reaches the tracker, in words; empty if it does."""


__all__ = ["BookendView", "DeliveringView", "HistogramView", "TrackingView", "View"]
