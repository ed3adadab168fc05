"""Which step a row of a log belongs to: by its step, or else by its epoch, or else by its number."""

from __future__ import annotations

import math

from forewarn.importing.log import Log


class StepCounter:
    """Follows the steps and epochs of a log from row to row.

    A step that begins again with each epoch is continued from the end of the epoch before.
    """

    def __init__(self, log: Log) -> None:
        self._log = log
        self._offset = 0
        self._last = -1
        self._epoch = -math.inf
        self._restarts = False
        self._kinds: set[str] = set()

    def step(self, row: int, step: int | None, epoch: float | None) -> int:
        """The step of this row."""
        if step is None:
            if epoch is not None and "step" not in self._kinds and epoch >= 0 and epoch == int(epoch):
                self._kinds.add("epoch")
                return int(epoch)
            if "step" in self._kinds:
                return max(self._last, 0)
            self._kinds.add("row")
            return row
        self._kinds.add("step")
        if epoch is not None and epoch > self._epoch:
            if step + self._offset < self._last and self._epoch > -math.inf:
                self._offset = self._last + 1 - min(step, 1)
                self._restarts = True
            self._epoch = epoch
        self._last = step + self._offset
        return self._last

    def finish(self) -> None:
        """Say how steps were counted, if that was not by the log's own steps."""
        if self._restarts:
            self._log.note("its steps begin again with each epoch, so they were added up")
        if self._kinds == {"epoch"}:
            self._log.step_is_epoch = True
            self._log.note("it counts epochs and no steps: a step below is an epoch")
        elif "row" in self._kinds and "step" not in self._kinds:
            self._log.note("it has no column of steps: a step below is a row of the log")
