"""How long a step takes, and the monitor's own share of it."""

from __future__ import annotations

import time
from types import TracebackType

from forewarn.measure.probe import ONE, Pending, Probe, Reading
from forewarn.measure.step import Step


class Stopwatch:
    """Adds up the time spent inside `with stopwatch:`; nested uses count once."""

    def __init__(self) -> None:
        self._depth = 0
        self._began = 0.0
        self._seconds = 0.0

    def __enter__(self) -> None:
        if self._depth == 0:
            self._began = time.perf_counter()
        self._depth += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._seconds += time.perf_counter() - self._began

    def take(self) -> float:
        """The seconds added up since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds


class SpeedProbe(Probe):
    """`speed/step_seconds` from one `monitor.step` to the next, and `monitor/overhead_share` of it on the host."""

    name = "speed"

    def __init__(self, stopwatch: Stopwatch) -> None:
        self._stopwatch = stopwatch
        self._last: float | None = None

    def collect(self, step: Step) -> Pending | None:
        now = time.perf_counter()
        last, self._last = self._last, now
        overhead_seconds = self._stopwatch.take()
        if last is None:
            return None
        readings = (
            Reading("speed/step_seconds", ONE, now - last),
            Reading("monitor/overhead_share", ONE, overhead_seconds / (now - last)),
        )
        return Pending(decode=lambda _: readings)
