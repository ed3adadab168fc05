"""What can go wrong when a stored run is read."""

from __future__ import annotations


class RunError(ValueError):
    """A path that holds no readable run. The message says what was found and what to do."""


class UnknownSeriesError(KeyError):
    """A series that the run does not hold. Unlike a plain KeyError it prints its sentence without quotes."""

    def __str__(self) -> str:
        return str(self.args[0])
