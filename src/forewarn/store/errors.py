"""What can go wrong when a stored run is read."""

from __future__ import annotations


class RunError(ValueError):
    """A path that holds no readable run. The message says what was found and what to do."""


class ResumedError(RunError):
    """A run that was resumed from an earlier step while it was read, so that what was read is no longer in it."""


class RunExistsError(FileExistsError):
    """A directory that already holds a run, or the remains of one; no process is writing it."""


class UnknownSeriesError(KeyError):
    """A series that the run does not hold. Unlike a plain KeyError it prints its sentence without quotes."""

    def __str__(self) -> str:
        return str(self.args[0])
