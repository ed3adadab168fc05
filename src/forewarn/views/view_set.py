"""All views of a run. A view that raises is removed, and training continues."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from forewarn.types import Action, Alert, Block, Distribution, RunEnd, RunStart
from forewarn.views import BookendView, DeliveringView, HistogramView, TrackingView, View

_log = logging.getLogger("forewarn")


class ViewSet:
    """Passes every step to every view, and records errors of views in `failures`."""

    def __init__(self, views: Sequence[View], failures: dict[str, str]) -> None:
        self._views = list(views)
        self._failures = failures
        self._delivering = [view for view in views if isinstance(view, DeliveringView)]
        self._tracking = [view for view in views if isinstance(view, TrackingView)]

    def show(
        self,
        step: int,
        blocks: Sequence[Block],
        distributions: Sequence[Distribution],
        changed: Sequence[Alert],
        taken: Sequence[Action],
    ) -> None:
        for view in list(self._views):
            if distributions and isinstance(view, HistogramView):
                self._safely(view, view.show_histograms, step, distributions)
            self._safely(view, view.show, step, blocks, changed, taken)

    @property
    def undelivered(self) -> bool:
        """Whether a view could not send its last message."""
        return bool(self._delivering) and any(view.undelivered for view in self._delivering)

    @property
    def unsent(self) -> str:
        """Why a tracker does not get everything, in words; empty if all of them do."""
        return next(filter(None, (view.unsent for view in self._tracking)), "") if self._tracking else ""

    def begin(self, start: RunStart) -> None:
        bookends = [view for view in self._views if isinstance(view, BookendView)]
        for view in bookends:
            self._safely(view, view.begin, start)
        if start.instead_of is not None and not bookends:  # no view tells the user where the run is
            _log.warning("%s already holds a run; this one is stored in %s", start.instead_of, start.path)

    def close(self, end: RunEnd | None = None) -> None:
        """Close each view once, even if an interrupt comes in between and this is called again."""
        while self._views:
            view = self._views.pop(0)
            if end is not None and isinstance(view, BookendView):
                self._safely(view, view.end, end)
            self._safely(view, view.close)

    def _safely(self, view: View, call: Callable[..., Any], *args: Any) -> None:
        try:
            call(*args)
        except Exception as error:
            name = f"view {type(view).__name__}"
            _log.exception("the %s failed and was removed; training continues", name)
            self._failures[name] = f"{type(error).__name__}: {error}"
            self._views = [other for other in self._views if other is not view]
