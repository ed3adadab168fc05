"""Which steps are measured in detail: the first ones, then every Nth, and every one around an anomaly."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from forewarn.settings import Settings, between

_LOOKS = 2
"""Steps on which to look again: on an accelerator a step is judged when the next one is under way."""


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
    """A schedule that measures every step while a warning waits for another check, and for a while after it."""

    def __init__(self, predicate: Callable[[int], bool], steps: int) -> None:
        self._predicate = predicate
        self._steps = steps
        self.until = -1
        """Every step up to this one is measured in detail."""
        self._agreed: list[tuple[int, int]] = []
        self._stretched: list[tuple[int, Schedule]] = []
        """What replaces the schedule, each from its first step on, in order."""

    def measured(self, step: int) -> bool:
        if not self._agreed and not self._stretched:  # as in most runs
            return step <= self.until or self._predicate(step)
        return self._is_dense(step) or self._regular(step)(step)

    def _is_dense(self, step: int) -> bool:
        return step <= self.until or any(first <= step <= last for first, last in self._agreed)

    def _regular(self, step: int) -> Callable[[int], bool]:
        """The schedule without what an anomaly adds."""
        for first, schedule in reversed(self._stretched):
            if first <= step:
                return schedule
        return self._predicate

    def is_exempt(self, step: int) -> bool:
        """Whether a step is measured whatever it costs: at the start, and after an anomaly."""
        return self._is_dense(step) or (isinstance(self._predicate, Schedule) and step < self._predicate.dense)

    def every(self, step: int) -> int:
        """The interval at a step; 0 if a function of the user chooses the steps."""
        regular = self._regular(step)
        return regular.every if isinstance(regular, Schedule) else 0

    def stretch(self, first: int, every: int) -> None:
        """Measure only one step in `every` from step `first` on."""
        dense = self._predicate.dense if isinstance(self._predicate, Schedule) else 0
        earlier = [change for change in self._stretched if change[0] < first]
        self._stretched = [*earlier, (first, Schedule(every, dense))]

    def state_dict(self) -> dict[str, Any]:
        return {"until": self.until, "stretched": [[first, schedule.every] for first, schedule in self._stretched]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the dense steps and the intervals of `state_dict`."""
        self.until = int(state["until"])
        for first, every in state["stretched"]:
            self.stretch(int(first), int(every))

    def escalate(self, step: int) -> None:
        """Measure the steps that follow `step` in detail."""
        self.until = max(self.until, self.end(step))

    def look_again(self, step: int) -> None:
        """Measure the few steps after `step` in detail, because a warning waits for another check."""
        self.until = max(self.until, step + min(_LOOKS, self._steps))

    def end(self, step: int) -> int:
        """The last of these steps."""
        return step + self._steps

    def agree(self, first: int, last: int) -> None:
        """Measure these steps in detail, as all ranks have agreed to."""
        self._agreed = [window for window in self._agreed if window[1] >= first] + [(first, last)]
