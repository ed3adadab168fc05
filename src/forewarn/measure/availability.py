"""Which metrics cannot be measured, and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from forewarn.measure.probe import Reading
from forewarn.types import Reason

_OF_ONE_STEP = (
    Reason.SCALED_GRADIENTS, Reason.STEP_SKIPPED, Reason.NO_BACKWARD_SEEN, Reason.UNEVEN_SCALE, Reason.AFTER_CLIPPING,
)  # fmt: skip
"""Reasons that hold for one step only. The others hold until a probe gives a different one."""


class Availability:
    """Turns the reasons that probes give on every step into `monitor/unavailable`, recorded when a reason changes.

    Reasons that hold for one step only are recorded on each of those steps.
    """

    def __init__(self) -> None:
        self._reasons: dict[str, Reason] = {}
        """By metric: why it is unavailable."""
        self.regained: list[str] = []
        """Metrics that are available again after a resume, until that is recorded."""

    def news(self, reasons: Mapping[str, Reason]) -> Iterator[Reading]:
        """The reasons of one step that need recording."""
        reasons = {**dict.fromkeys(self.regained, Reason.AVAILABLE), **reasons}
        self.regained = []
        changed = {
            metric: reason
            for metric, reason in reasons.items()
            if reason in _OF_ONE_STEP or reason is not self._reasons.get(metric, Reason.AVAILABLE)
        }
        if changed:
            self._reasons |= changed
            yield Reading("monitor/unavailable", tuple(changed), [float(reason) for reason in changed.values()])

    def state_dict(self) -> dict[str, Any]:
        return {metric: int(reason) for metric, reason in self._reasons.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`; a probe that failed runs again in a new process."""
        self._reasons = {metric: Reason(int(reason)) for metric, reason in state.items()}
        self.regained = [metric for metric, reason in self._reasons.items() if reason is Reason.PROVIDER_FAILED]
