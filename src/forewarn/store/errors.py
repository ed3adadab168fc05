"""What can go wrong when a stored run is read."""

from __future__ import annotations


class RunError(ValueError):
    """The path holds no readable run. The message says what was found and what to do."""


class ResumedError(RunError):
    """The run was resumed from an earlier step while it was read, so some of what was read no longer exists."""


class RunExistsError(FileExistsError):
    """The directory already holds a run, or the remains of one, that no process is writing."""


class UnknownSeriesError(KeyError):
    """The run does not hold this series. Unlike a plain KeyError, its message prints without quotes."""

    def __str__(self) -> str:
        return str(self.args[0])
