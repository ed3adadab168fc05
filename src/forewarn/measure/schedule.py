"""Which steps are measured in detail: the first ones, then every Nth, and every one for a while after an anomaly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from forewarn.settings import Settings, between


@dataclass(frozen=True, slots=True)
class Schedule(Settings):
    """Every step at first, then every Nth."""

    every: int = between(100, 1)
    dense: int = between(10, 0)
    """All of the first `dense` steps are measured: most setup mistakes show there."""

    def __call__(self, step: int) -> bool:
        return step < self.dense or step % self.every == 0


def as_predicate(every: int | Schedule | Callable[[int], bool]) -> Callable[[int], bool]:
    """Turn what `watch(every=…)` accepts into a function that says whether a step is measured in detail."""
    if isinstance(every, bool) or not (isinstance(every, int) or callable(every)):
        raise TypeError(f"every must be an int, a Schedule or a function of the step, not {every!r}")
    if isinstance(every, int) and every < 1:
        raise ValueError(f"every must be at least 1, not {every}")
    return Schedule(every=every) if isinstance(every, int) else every


class Escalation:
    """A schedule that measures every step for a while after an anomaly."""

    def __init__(self, predicate: Callable[[int], bool], steps: int) -> None:
        self._predicate = predicate
        self._steps = steps
        self.until = -1
        """Every step up to this one is measured in detail."""
        self._agreed: list[tuple[int, int]] = []

    def measured(self, step: int) -> bool:
        agreed = any(first <= step <= last for first, last in self._agreed)
        return step <= self.until or agreed or self._predicate(step)

    def escalate(self, step: int) -> None:
        """Measure the steps that follow `step` in detail."""
        self.until = max(self.until, self.end(step))

    def end(self, step: int) -> int:
        """The last of these steps."""
        return step + self._steps

    def agree(self, first: int, last: int) -> None:
        """Measure these steps in detail, as all ranks have agreed to."""
        self._agreed = [window for window in self._agreed if window[1] >= first] + [(first, last)]
