"""A thread that notices when a run hangs."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

from forewarn.measure.stopwatch import Stopwatch

_TIMES_USUAL = 20.0
"""How many times the usual time of a step may pass without an event."""
_FIRST_STEPS = 2
"""Steps that may take as long as they need: code is compiled, workers start, files are read for the first time."""
_CHECKS = 4
"""How often it looks within the shortest stall."""


class Watchdog:
    """Calls `alarm(phase, seconds)` once for each stall, from a daemon thread that starts after the first steps.

    It keeps neither the run nor the process alive.
    """

    def __init__(self, stopwatch: Stopwatch, alarm: weakref.WeakMethod[Callable[[str, float], Any]], least: float):
        """`least`: the shortest stall in seconds."""
        self._stopwatch = weakref.ref(stopwatch)
        self._alarm = alarm
        self._least = least
        self._told_at = -1
        """Number of steps at the last alarm."""
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread, once the first steps are over. May be called after every step."""
        stopwatch = self._stopwatch()
        if self._thread is None and stopwatch is not None and stopwatch.num_steps >= _FIRST_STEPS:
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
        seconds = stopwatch.idle_seconds
        hangs = seconds > max(self._least, _TIMES_USUAL * stopwatch.usual_seconds)
        if hangs and stopwatch.num_steps != self._told_at:
            self._told_at = stopwatch.num_steps
            alarm(stopwatch.hangs_in(), seconds)
        return True

    def _watch(self) -> None:
        while not self._stop.wait(self._least / _CHECKS) and self.check():
            pass
