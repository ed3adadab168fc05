"""How long a step takes, where its time goes, and how much is trained per second."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from forewarn.measure.engine import Numbers
from forewarn.measure.probe import ONE, Array, Pending, Probe, Reading
from forewarn.measure.probes.loss import as_scalar
from forewarn.measure.step import Step
from forewarn.measure.stopwatch import EVALUATION, PHASES, Event, Stopwatch

COUNTED = ("tokens", "samples")
"""What a loop may count with `monitor.step(loss, tokens=…)`."""

_LEAST_SECONDS = 1.0
"""Minimum time between two readings of the phases on steps that are not measured."""
_DECAY = 0.95
"""Of the moving average of the time of a step."""


class SpeedProbe(Probe):
    """The time of every step, and from time to time its phases and what was trained per second.

    Phases and rates are means since the reading before. They are recorded on measured steps, and on others once a
    second at most.
    """

    name = "speed"

    def __init__(self, stopwatch: Stopwatch, flops_share_per_token: float | None = None) -> None:
        """`flops_share_per_token`: the floating-point operations for a token, as a share of the peak per second."""
        self._stopwatch = stopwatch
        self._flops_share = flops_share_per_token
        self._last: tuple[float, float] | None = None
        """At the end of the last step: the time of all steps, and the monitor's part of it."""
        self._read_at = 0.0
        """The time of all steps at the last reading of the phases."""
        self._seconds = [0.0] * len(PHASES)
        self._num_steps = 0
        """Number of steps since that reading."""
        self._evaluated = 0.0
        """Seconds of unmarked evaluations that have been recorded."""
        self._counted: dict[str, Any] = {}
        """By what is counted: the sum since that reading."""
        self.stalls: dict[str, float] = {}
        """By phase: the seconds for which a step hung, noticed by the watchdog and not recorded yet."""

    def give(self, counts: dict[str, Any]) -> None:
        """Add the numbers of tokens or samples of the step that ends now."""
        for name, count in counts.items():
            number = as_scalar(name, count)
            self._counted[name] = self._counted.get(name, 0.0) + (number if torch.is_tensor(number) else float(number))

    def collect(self, step: Step) -> Pending | None:
        watch = self._stopwatch
        last, now = self._last, watch.end_step()
        self._last = now
        if last is None:  # what came before the first step is not known
            self._begin_interval(now[0])
            return None
        seconds = now[0] - last[0]
        watch.usual_seconds = _DECAY * watch.usual_seconds + (1 - _DECAY) * seconds if watch.usual_seconds else seconds
        self._num_steps += 1
        readings = [
            Reading("speed/step_seconds", ONE, seconds),
            Reading("monitor/overhead_share", ONE, (now[1] - last[1]) / seconds if seconds else 0.0),
        ]
        if watch.pauses or watch.seconds[-1] > self._evaluated:
            readings.append(self._pauses())
        if self.stalls:
            stalls, self.stalls = self.stalls, {}
            readings.append(Reading("speed/stall_seconds", tuple(stalls), list(stalls.values())))
        if not step.measured and now[0] - self._read_at < _LEAST_SECONDS:
            return Pending(decode=lambda _: readings)
        return self._interval(now[0], readings)

    def _interval(self, now: float, readings: list[Reading]) -> Pending:
        """The readings of the step, with the phases and rates since the last time."""
        watch, counted, elapsed = self._stopwatch, self._counted, now - self._read_at
        readings.append(Reading("speed/phase_seconds", PHASES, self._phases()))
        self._begin_interval(now)

        def decode(arrays: Sequence[Array]) -> list[Reading]:
            for name, total in zip(counted, arrays, strict=True):
                rate = float(total) / elapsed if elapsed else 0.0
                readings.append(Reading(f"speed/{name}_per_second", ONE, rate))
                if name == "tokens" and self._flops_share is not None:
                    readings.append(Reading("speed/flops_utilization", ONE, rate * self._flops_share))
            return readings

        if watch.timeline is not None:
            watch.timeline.begin()
        totals: list[Numbers] = [total if torch.is_tensor(total) else np.array(total) for total in counted.values()]
        return Pending(totals, decode)

    def _phases(self) -> list[float]:
        """Seconds per step of each phase: on an accelerator those of one step on the device, if it is that far."""
        watch = self._stopwatch
        host = [(now - before) / self._num_steps for now, before in zip(watch.seconds, self._seconds, strict=False)]
        device = None if watch.timeline is None else watch.timeline.seconds()
        if device is None:
            return host
        device[PHASES.index("monitor")] = 0.0
        return device[: len(PHASES)]

    def _pauses(self) -> Reading:
        watch = self._stopwatch
        pauses, watch.pauses = watch.pauses, {}
        if watch.seconds[-1] > self._evaluated:
            pauses[EVALUATION] = pauses.get(EVALUATION, 0.0) + watch.seconds[-1] - self._evaluated
            self._evaluated = watch.seconds[-1]
        return Reading("speed/pause_seconds", tuple(pauses), list(pauses.values()))

    def _begin_interval(self, now: float) -> None:
        self._read_at, self._num_steps, self._counted = now, 0, {}
        self._seconds = self._stopwatch.seconds[: len(PHASES)]


def device_event() -> Event | None:
    """An event on the CUDA device that times; None while a graph is captured, which it could spoil."""
    if torch.cuda.is_current_stream_capturing():
        return None
    return torch.cuda.Event(enable_timing=True)
