"""Which steps are measured in detail: the first ones, then every N, and every one for a while after an anomaly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Schedule:
    """Dense for the first steps, then every N."""

    every: int = 100
    dense: int = 10
    """All of the first `dense` steps are measured: most faults of set-up show there."""

    def __post_init__(self) -> None:
        for name, least in (("every", 1), ("dense", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"Schedule.{name} must be an int, not {value!r}")
            if value < least:
                raise ValueError(f"Schedule.{name} must be at least {least}, not {value}")

    def __call__(self, step: int) -> bool:
        return step < self.dense or step % self.every == 0


def as_predicate(every: int | Schedule | Callable[[int], bool]) -> Callable[[int], bool]:
    """What `watch(every=…)` accepts, as a function from a step to whether it is measured in detail."""
    if isinstance(every, bool) or not (isinstance(every, int) or callable(every)):
        raise TypeError(f"every must be an int, a Schedule or a function of the step, not {every!r}")
    return Schedule(every=every) if isinstance(every, int) else every


class Escalation:
    """A schedule that turns dense for a while after an anomaly."""

    def __init__(self, predicate: Callable[[int], bool], steps: int) -> None:
        self._predicate = predicate
        self._steps = steps
        self.until = -1
        """Every step up to this one is measured in detail."""

    def measured(self, step: int) -> bool:
        return step <= self.until or self._predicate(step)

    def escalate(self, step: int) -> None:
        """Measure the steps that follow `step` in detail."""
        self.until = max(self.until, step + self._steps)
