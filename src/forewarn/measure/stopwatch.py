"""Where the time of a run goes: the phases of its steps, the monitor's own part and pauses."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Protocol

PHASES = ("data", "between passes", "forward", "backward", "optimizer", "monitor", "other")
_DATA, _BETWEEN, _FORWARD, _BACKWARD, _OPTIMIZER, _MONITOR, _OTHER, _EVALUATION = range(8)
EVALUATION = "eval"
"""The pause in which evaluations count that the loop does not mark."""

(
    STEP_ENDED, WAITING_FOR_DATA, IN_FORWARD, FORWARD_ENDED, IN_BACKWARD, BACKWARD_ENDED, IN_UPDATE, UPDATE_ENDED,
    IN_EVALUATION, EVALUATION_ENDED,
) = range(10)  # fmt: skip
"""What a loop is doing, by the last event that was seen."""

_ITSELF = (
    _OTHER, _DATA, _FORWARD, _OTHER, _BACKWARD, _OTHER, _OPTIMIZER, _OTHER, _EVALUATION, _OTHER,
)  # fmt: skip
"""By state: the phase that its time belongs to, whatever follows."""
_UNTIL = {
    (FORWARD_ENDED, IN_FORWARD): _FORWARD,
    (FORWARD_ENDED, IN_BACKWARD): _FORWARD,  # the loss is computed
    (FORWARD_ENDED, BACKWARD_ENDED): _BACKWARD,  # a pass that was recomputed within the backward pass
    (FORWARD_ENDED, IN_UPDATE): _BACKWARD,  # nobody watched the backward pass
    (BACKWARD_ENDED, IN_BACKWARD): _BACKWARD,
    (BACKWARD_ENDED, IN_UPDATE): _OPTIMIZER,  # gradients are unscaled and clipped
    (BACKWARD_ENDED, UPDATE_ENDED): _OPTIMIZER,  # in a closure
    (EVALUATION_ENDED, IN_EVALUATION): _EVALUATION,
}
"""By state and the next one: the phase, where it depends on what follows."""
_BEFORE_A_FORWARD = (STEP_ENDED, BACKWARD_ENDED, EVALUATION_ENDED)
"""The states in which a loop whose loader is not watched gets its next batch."""

_HANGS_IN = (
    "between passes", "data", "forward", "backward", "backward", "optimizer", "optimizer", "other", "evaluation",
    "evaluation",
)  # fmt: skip


def _phases(is_loader_watched: bool) -> list[list[int]]:
    """The phase of the time between two events: [state before × state after]."""
    table = [[_UNTIL.get((state, after), _ITSELF[state]) for after in range(10)] for state in range(10)]
    if not is_loader_watched:
        for state in _BEFORE_A_FORWARD:
            table[state][IN_FORWARD] = _BETWEEN
    return table


class Event(Protocol):
    """An event on a device, such as a `torch.cuda.Event` with timing."""

    def record(self) -> Any: ...

    def query(self) -> bool: ...

    def elapsed_time(self, end_event: Any, /) -> float: ...


class Timeline:
    """The phases of one step as the device sees them; read when it has passed them, so that nobody waits."""

    def __init__(self, make_event: Callable[[], Event | None]) -> None:
        """`make_event` returns None where no event can be recorded."""
        self._make_event = make_event
        self._marks: list[tuple[int, Event]] = []
        self.is_open = False

    def begin(self) -> None:
        """Start over, at the beginning of a step."""
        self._marks.clear()
        self.is_open = True
        self.mark(_OTHER)

    def mark(self, phase: int) -> None:
        """The phase ends here."""
        event = self._make_event()
        if event is None:
            self._marks.clear()
            self.is_open = False
        else:
            event.record()
            self._marks.append((phase, event))

    def seconds(self) -> list[float] | None:
        """The seconds of each phase; None if the device is not that far yet or nothing was recorded."""
        if self.is_open or len(self._marks) < 2 or not self._marks[-1][1].query():
            return None
        seconds = [0.0] * 8
        for (_, start), (phase, end) in zip(self._marks, self._marks[1:], strict=False):
            seconds[phase] += start.elapsed_time(end) / 1000
        self._marks.clear()
        return seconds


class Stopwatch:
    """Adds up the time of each phase. The time inside `with stopwatch:` is the monitor's; nested uses count once.

    It runs on every step, so an event inside `with stopwatch:` does not even look at the clock.
    """

    __slots__ = (
        "__weakref__", "_depth", "_in_state", "_phases", "_since", "clock", "is_paused", "num_steps", "pauses",
        "seconds", "state", "timeline", "usual_seconds",
    )  # fmt: skip

    def __init__(
        self, clock: Callable[[], float] = time.perf_counter, make_event: Callable[[], Event | None] | None = None
    ) -> None:
        self.clock = clock
        self.timeline = None if make_event is None else Timeline(make_event)
        """The phases on an accelerator, where the host runs ahead of the device."""
        self.num_steps = 0
        self.usual_seconds = 0.0
        """A moving average of the time of a step."""
        self.seconds = [0.0] * 8
        """By phase, since the beginning; last, the evaluations that the loop does not mark."""
        self.pauses: dict[str, float] = {}
        """The seconds of pauses since the last step, by kind."""
        self.is_paused = False
        self._depth = 0
        self._since = clock()
        """When time was last added up."""
        self.state = STEP_ENDED
        self._in_state = 0.0
        """The time since the state began, without the monitor's."""
        self._phases = _phases(False)

    def __enter__(self) -> None:
        if self._depth == 0:
            now = self.clock()
            self._in_state += now - self._since
            self._since = now
        self._depth += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._depth -= 1
        if self._depth == 0:
            now = self.clock()
            self.seconds[_MONITOR] += now - self._since
            self._since = now

    def begin(self, state: int, own: int = 0) -> None:
        """The loop does something else from now on; with `own` 1, after the monitor's part, which `__exit__` ends."""
        if self._depth == 0:
            now = self.clock()
            self._in_state += now - self._since
            self._since = now
        self._depth += own
        if self.is_paused:
            return
        phase = self._phases[self.state][state]
        self.seconds[phase] += self._in_state
        self._in_state = 0.0
        self.state = state
        if self.timeline is not None and self.timeline.is_open:
            self.timeline.mark(phase)

    def end_step(self) -> tuple[float, float]:
        """The time of all steps up to now without pauses, and the monitor's part of it."""
        if self._depth:
            now = self.clock()
            self.seconds[_MONITOR] += now - self._since
            self._since = now
        self.begin(STEP_ENDED)
        self.num_steps += 1
        if self.timeline is not None:
            self.timeline.is_open = False
        return self.spent

    @property
    def spent(self) -> tuple[float, float]:
        """The time of all steps up to the last one without pauses, and the monitor's part of it up to now."""
        return sum(self.seconds) - self.seconds[_EVALUATION], self.seconds[_MONITOR]

    def watch_loader(self) -> None:
        """From now on only the time inside `waiting` is time for data."""
        self._phases = _phases(True)

    def hangs_in(self) -> str:
        """The phase in which the loop is now, as far as the events tell."""
        return "monitor" if self._depth else _HANGS_IN[self.state]

    @property
    def idle_seconds(self) -> float:
        """The time since the last event of any kind; 0 in a pause."""
        return 0.0 if self.is_paused else self.clock() - self._since

    @contextmanager
    def pause(self, kind: str) -> Iterator[None]:
        """Time that belongs to no step. A pause within another is a part of it."""
        if self.is_paused:
            yield
            return
        self.begin(self.state)
        self.is_paused = True
        began, own = self.clock(), self.seconds[_MONITOR]
        try:
            yield
        finally:
            now = self.clock()
            paused = now - began - (self.seconds[_MONITOR] - own)
            self.pauses[kind] = self.pauses.get(kind, 0.0) + paused
            self.is_paused = False
            self._in_state, self._since = 0.0, now
