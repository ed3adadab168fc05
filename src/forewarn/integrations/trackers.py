"""Views of the trackers that a training library already reports to."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from forewarn.views import View
from forewarn.views.console import AlertLines

_log = logging.getLogger("forewarn")


def with_trackers(views: Sequence[View] | None, trackers: Iterable[partial[Any]]) -> list[View]:
    """The user's views, by default alert lines, and one for each tracker that has none among them."""
    shown_in: list[View] = [AlertLines()] if views is None else list(views)
    for make in trackers:
        if any(type(view) is make.func for view in shown_in):
            continue
        try:
            shown_in.append(make())
        except Exception as error:  # the training must go on, with one view less
            _log.warning("nothing is written to the tracker of the trainer: %s", error)
    return shown_in
