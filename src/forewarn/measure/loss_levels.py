"""The course of the loss in few numbers: its level every so many steps, and what it did since the last epoch ended."""

from __future__ import annotations

import math
from collections import deque
from typing import Any

import numpy as np

STEPS_PER_LEVEL = 32
"""Losses whose median is one level: 1024 levels, as many as are kept in memory, reach back over 32,768 steps."""
LOSSES_OF_AN_END = 16
"""Losses whose median is the level at the start of the run, and at the end of an epoch."""


class Levels:
    """The first loss, then the median of every 32 losses; what is not finite is left out."""

    def __init__(self) -> None:
        self._started = False
        self._losses: list[float] = []

    def add(self, loss: float) -> float | None:
        """Take in one loss; returns the level that it completes, if any."""
        if not math.isfinite(loss):
            return None
        self._losses.append(loss)
        if not self._started:
            self._started = True
            return loss
        if len(self._losses) < STEPS_PER_LEVEL:
            return None
        level = float(np.median(self._losses))
        self._losses.clear()
        return level

    def state_dict(self) -> dict[str, Any]:
        return {"started": self._started, "losses": list(self._losses)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._started, self._losses = bool(state["started"]), [float(each) for each in state["losses"]]


class EpochLosses:
    """The losses of the epoch under way; what is not finite is left out."""

    def __init__(self) -> None:
        self.steps = 0
        """Losses since the last epoch ended."""
        self.peak = math.nan
        """The highest median of 16 losses in a row since then: a single bad batch does not make it."""
        self._sum = 0.0
        self._first: list[float] = []
        self._last: deque[float] = deque(maxlen=LOSSES_OF_AN_END)

    def add(self, loss: float) -> None:
        if not math.isfinite(loss):
            return
        self.steps += 1
        self._sum += loss
        if len(self._first) < LOSSES_OF_AN_END:
            self._first.append(loss)
        self._last.append(loss)
        if self.steps % LOSSES_OF_AN_END == 0:
            self.peak = float(np.fmax(self.peak, np.median(self._last)))

    @property
    def mean(self) -> float:
        """Over the epoch; NaN if it had no loss."""
        return self._sum / self.steps if self.steps else math.nan

    @property
    def start(self) -> float:
        """Where the run started: the median of its first losses, or the very first if they rose; NaN if too few."""
        enough = len(self._first) == LOSSES_OF_AN_END
        return min(self._first[0], float(np.median(self._first))) if enough else math.nan

    @property
    def end(self) -> float:
        """The median of the newest losses; NaN while there are too few to tell an end from a start."""
        apart = self.steps >= 2 * LOSSES_OF_AN_END
        return float(np.median(self._last)) if apart else math.nan

    def begin(self) -> None:
        """A new epoch begins; where the run started is kept."""
        self.steps, self._sum, self.peak = 0, 0.0, math.nan

    def recall(self, start: float) -> None:
        """Go on with a run that started there; NaN if that is not known any more."""
        self._first = [start] * LOSSES_OF_AN_END

    def state_dict(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "sum": self._sum,
            "peak": self.peak,
            "first": list(self._first),
            "last": list(self._last),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps, self._sum, self.peak = int(state["steps"]), float(state["sum"]), float(state["peak"])
        self._first = [float(each) for each in state["first"]]
        self._last.clear()
        self._last.extend(float(each) for each in state["last"])
