"""Which step a row of a log belongs to: by its step, or else by its epoch, or else by its number."""

from __future__ import annotations

import math
from array import array
from itertools import pairwise

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
        self._has_steps = False
        self._epochs = array("d")
        """The epoch of each row, until there is a row with a step."""

    def step(self, row: int, step: int | None, epoch: float | None) -> int:
        """The step of this row."""
        if step is None:
            if self._has_steps:
                return max(self._last, 0)
            self._epochs.extend([math.nan] * (row - len(self._epochs)))
            self._epochs.append(math.nan if epoch is None else epoch)
            return row
        self._has_steps = True
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
        if self._has_steps or not self._log.tracks:
            return
        if self._is_by_epoch():
            for track in self._log.tracks.values():
                track.steps = array("q", (int(self._epochs[row]) for row in track.steps))
            self._log.step_is_epoch = True
            self._log.note("it counts epochs and no steps: a step below is an epoch")
        else:
            self._log.note("it does not number its steps: a step below is a row of the log")

    def _is_by_epoch(self) -> bool:
        """Whether each reading has an epoch of its own: with several in one epoch, rows tell more."""
        if not all(epoch >= 0 and epoch.is_integer() for epoch in self._epochs):
            return False
        tracks = ((self._epochs[row] for row in track.steps) for track in self._log.tracks.values())
        return all(epoch != following for epochs in tracks for epoch, following in pairwise(epochs))
