"""What cannot be measured, and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from forewarn.measure.probe import Reading
from forewarn.types import Reason

_OF_ONE_STEP = (Reason.SCALED_GRADIENTS, Reason.STEP_SKIPPED, Reason.NO_BACKWARD_SEEN, Reason.UNEVEN_SCALE)
"""Reasons that hold for the step at which they are said. Others hold until another is said."""


class Availability:
    """Turns what probes say on every step into `monitor/unavailable`: said once, and taken back once.

    What holds for one step only is said on each of them.
    """

    def __init__(self) -> None:
        self._reasons: dict[str, Reason] = {}
        """By metric: why it is unavailable."""

    def news(self, reasons: Mapping[str, Reason]) -> Iterator[Reading]:
        """What is to be recorded of the reasons that were given on one step."""
        new = {
            metric: reason
            for metric, reason in reasons.items()
            if reason in _OF_ONE_STEP or reason is not self._reasons.get(metric, Reason.AVAILABLE)
        }
        if new:
            self._reasons |= new
            yield Reading("monitor/unavailable", tuple(new), [float(reason) for reason in new.values()])

    def state_dict(self) -> dict[str, Any]:
        return {metric: int(reason) for metric, reason in self._reasons.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._reasons = {metric: Reason(int(reason)) for metric, reason in state.items()}
