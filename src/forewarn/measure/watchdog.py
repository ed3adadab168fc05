"""A thread that notices when a run hangs."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from forewarn.measure.stopwatch import Stopwatch
from forewarn.metrics import TRAINING_PHASES

_TIMES_USUAL = 20.0
"""How many times the usual time of a step may pass without an event."""
FIRST_STEPS = 2
"""Steps that may take as long as they need: code is compiled, workers start, files are read for the first time."""
_CHECKS = 4
"""How often it looks within the shortest stall."""
_BUSY_SHARE = 0.1
"""The share of a core that a process uses at least if it is at work."""
_TIMES_BUSY = 10.0
"""How many times as long it may be at work outside of those phases."""


class Watchdog:
    """Calls `alarm(phase, seconds)` once for each stall, from a daemon thread that starts after the first steps.

    It keeps neither the run nor the process alive.
    """

    def __init__(
        self,
        stopwatch: Stopwatch,
        alarm: weakref.WeakMethod[Callable[[str, float], Any]],
        least: float,
        cpu_clock: Callable[[], float] = time.process_time,
    ) -> None:
        """`least`: the shortest stall in seconds."""
        self._stopwatch = weakref.ref(stopwatch)
        self._alarm = alarm
        self._least = least
        self._cpu_clock = cpu_clock
        self._last = stopwatch.clock(), cpu_clock()
        """The time and the CPU time at the last look."""
        self._told_at = -1
        """Number of steps at the last alarm."""
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=self._watch, name="forewarn watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Let the thread end; nobody waits for it."""
        self._stop.set()

    def check(self) -> bool:
        """Raise the alarm if the run hangs; returns whether there is still something to watch."""
        stopwatch, alarm = self._stopwatch(), self._alarm()
        if stopwatch is None or alarm is None:
            return False
        (then, cpu_then), (now, cpu_now) = self._last, (stopwatch.clock(), self._cpu_clock())
        self._last = now, cpu_now
        seconds, phase = stopwatch.idle_seconds, stopwatch.hangs_in()
        limit = max(self._least, _TIMES_USUAL * stopwatch.usual_seconds)
        if phase not in TRAINING_PHASES and cpu_now - cpu_then > _BUSY_SHARE * (now - then):
            limit *= _TIMES_BUSY
        if seconds > limit and stopwatch.num_steps != self._told_at:
            self._told_at = stopwatch.num_steps
            alarm(phase, seconds)
        return True

    def _watch(self) -> None:
        while not self._stop.wait(self._least / _CHECKS) and self.check():
            pass
