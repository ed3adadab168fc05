"""System resources that the run uses."""

from __future__ import annotations

import math
import time

import psutil

from forewarn.measure.probe import ONE, Pending, Probe, Reading
from forewarn.measure.step import Step

_LEAST_SECONDS = 1.0
"""Minimum time between two readings: each costs tens of microseconds."""


class SystemProbe(Probe):
    """`system/process_memory_bytes`, the resident memory of this process, at most once a second."""

    name = "system"

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._looked = -math.inf

    def collect(self, step: Step) -> Pending | None:
        now = time.monotonic()
        if now - self._looked < _LEAST_SECONDS:
            return None
        self._looked = now
        reading = Reading("system/process_memory_bytes", ONE, self._process.memory_info().rss)
        return Pending(decode=lambda _: (reading,))
