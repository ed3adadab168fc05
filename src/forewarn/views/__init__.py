"""What shows a run while it trains. A view is handed each step after it was judged, and never changes anything."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from forewarn.types import Action, Alert, Block


class View(Protocol):
    """Anything that can show steps; `watch(views=[…])` takes any number of them."""

    def show(self, step: int, blocks: Sequence[Block], changed: Sequence[Alert], taken: Sequence[Action]) -> None:
        """Show one step: what was measured, the alerts that changed (most important first), the actions taken."""

    def close(self) -> None:
        """The run is over."""


__all__ = ["View"]
