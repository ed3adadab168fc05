"""The course of the training loss, in the few numbers that are recorded of it."""

from __future__ import annotations

import math
from collections import deque
from typing import Any

import numpy as np

from forewarn.measure.ema import Ema

STEPS_PER_LEVEL = 32
"""Losses whose median is one level: 1024 levels, as many as are kept in memory, reach back over 32,768 steps."""
LOSSES_OF_AN_END = 16
"""Losses whose median is the level at the start of the run, and at the end of an epoch."""


class LossCourse:
    """Takes in every loss of a run; a loss that is not finite is left out.

    What follows from it is recorded, and whoever else needs the course of the loss reads those readings. The one other
    thing that is kept is the `LossCurve` of `judge.forecast`: the shape of the whole run in bounded memory, for which
    levels of 32 steps are too coarse at the start of a run and too many at the end of a long one.
    """

    def __init__(self, ema_decay: float | None = None) -> None:
        self._ema = None if ema_decay is None else Ema(ema_decay)
        self._started = False
        self._since_level: list[float] = []
        self.steps = 0
        """Losses since the last epoch ended."""
        self.peak = math.nan
        """The highest median of 16 losses in a row since then: a single bad batch does not make it."""
        self._sum = 0.0
        self._first: list[float] = []
        self._last: deque[float] = deque(maxlen=LOSSES_OF_AN_END)

    def add(self, loss: float) -> dict[str, float]:
        """Take in one loss; returns what is recorded of the course at this step, by the name of the metric.

        The moving average is recorded at every step. A level is the first loss, then the median of every 32.
        """
        average = {} if self._ema is None else {"train/loss_ema": self._ema.update(loss)}
        if not math.isfinite(loss):
            return average
        self._add_to_epoch(loss)
        self._since_level.append(loss)
        if not self._started:
            self._started = True
            return {**average, "train/loss_level": loss}
        if len(self._since_level) < STEPS_PER_LEVEL:
            return average
        level = float(np.median(self._since_level))
        self._since_level.clear()
        return {**average, "train/loss_level": level}

    def _add_to_epoch(self, loss: float) -> None:
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

    def begin_epoch(self) -> None:
        """A new epoch begins; where the run started is kept."""
        self.steps, self._sum, self.peak = 0, 0.0, math.nan

    def recall(self, ema: float, start: float) -> None:
        """Go on with a run that started there; NaN if that is not known any more."""
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
        """Parts that the state does not have are left as they are."""
        if self._ema is not None and "ema" in state:
            self._ema.value = float(state["ema"])
        if levels := state.get("levels"):
            self._started, self._since_level = bool(levels["started"]), [float(loss) for loss in levels["losses"]]
        if epoch := state.get("epoch"):
            self.steps, self._sum, self.peak = int(epoch["steps"]), float(epoch["sum"]), float(epoch["peak"])
            self._first = [float(loss) for loss in epoch["first"]]
            self._last = deque((float(loss) for loss in epoch["last"]), maxlen=LOSSES_OF_AN_END)
