"""The course of the training loss, condensed into a few recorded numbers."""

from __future__ import annotations

import math
from collections import deque
from statistics import median
from typing import Any

import numpy as np

from forewarn.measure.ema import Ema

STEPS_PER_LEVEL = 32
"""Number of losses in the median of one level: the 1024 levels kept in memory cover 32,768 steps."""
LOSSES_OF_AN_END = 16
"""Number of losses in the median at the start of the run, and at the end of an epoch."""


class LossCourse:
    """Follows every loss of a run; non-finite losses are skipped.

    Its results are recorded, and everyone else reads the recorded values. The exception is `LossCurve` in
    `judge.forecast`, which keeps the shape of the whole run in bounded memory. Levels of 32 steps are too coarse for it
    at the start of a run, and too many at the end of a long one.
    """

    def __init__(self, ema_decay: float | None = None, losses_per_level: int = STEPS_PER_LEVEL) -> None:
        self._ema = None if ema_decay is None else Ema(ema_decay)
        self._losses_per_level = losses_per_level
        self._started = False
        self._since_level: list[float] = []
        self.steps = 0
        """Number of losses since the last epoch ended."""
        self.peak = math.nan
        """The highest median of 16 consecutive losses since then, so that one bad batch does not set it."""
        self._sum = 0.0
        self._first: list[float] = []
        self._last: deque[float] = deque(maxlen=LOSSES_OF_AN_END)

    def add(self, loss: float) -> dict[str, float]:
        """Add one loss; returns the values to record at this step, by metric.

        The moving average is recorded at every step. The first level is the first loss, the next ones the median of
        every 32.
        """
        average = {} if self._ema is None else {"train/loss_ema": self._ema.update(loss)}
        if not math.isfinite(loss):
            return average
        self._add_to_epoch(loss)
        self._since_level.append(loss)
        if not self._started:
            self._started = True
            return {**average, "train/loss_level": loss}
        if len(self._since_level) < self._losses_per_level:
            return average
        level = median(self._since_level)
        self._since_level.clear()
        return {**average, "train/loss_level": level}

    def _add_to_epoch(self, loss: float) -> None:
        self.steps += 1
        self._sum += loss
        if len(self._first) < LOSSES_OF_AN_END:
            self._first.append(loss)
        self._last.append(loss)
        if self.steps % LOSSES_OF_AN_END == 0:
            level = median(self._last)
            self.peak = self.peak if self.peak >= level else level

    @property
    def mean(self) -> float:
        """The mean over the epoch; NaN if it had no loss."""
        return self._sum / self.steps if self.steps else math.nan

    @property
    def start(self) -> float:
        """The loss at the start of the run: the median of the first 16, or the first if it is lower; NaN if too few."""
        enough = len(self._first) == LOSSES_OF_AN_END
        return min(self._first[0], float(np.median(self._first))) if enough else math.nan

    @property
    def end(self) -> float:
        """The median of the latest losses; NaN while there are too few to tell the end from the start."""
        apart = self.steps >= 2 * LOSSES_OF_AN_END
        return float(np.median(self._last)) if apart else math.nan

    def begin_epoch(self) -> None:
        """Begin a new epoch; the start of the run is kept."""
        self.steps, self._sum, self.peak = 0, 0.0, math.nan

    def recall(self, ema: float, start: float) -> None:
        """Continue a run from these values; NaN where a value is not known."""
        if self._ema is not None:
            self._ema.value = ema
        self._started, self._since_level = True, []
        self._first = [start] * LOSSES_OF_AN_END

    def state_dict(self) -> dict[str, Any]:
        return {
            **({} if self._ema is None else {"ema": self._ema.value}),
            "levels": {"started": self._started, "losses": list(self._since_level)},
            "epoch": {
                "steps": self.steps,
                "sum": self._sum,
                "peak": self.peak,
                "first": list(self._first),
                "last": list(self._last),
            },
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state; missing parts keep their current values."""
        if self._ema is not None and "ema" in state:
            self._ema.value = float(state["ema"])
        if levels := state.get("levels"):
            self._started, self._since_level = bool(levels["started"]), [float(loss) for loss in levels["losses"]]
        if epoch := state.get("epoch"):
            self.steps, self._sum, self.peak = int(epoch["steps"]), float(epoch["sum"]), float(epoch["peak"])
            self._first = [float(loss) for loss in epoch["first"]]
            self._last = deque((float(loss) for loss in epoch["last"]), maxlen=LOSSES_OF_AN_END)
