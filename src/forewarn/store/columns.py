"""The columns of a span: step, pattern and times of many rows, packed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from forewarn.store.errors import RunError

STEPS = np.dtype("<i8")
PATTERNS = np.dtype("<i4")
TIMES = np.dtype("<f8")

MOST_ROWS = 1 << 18
"""Maximum rows in a span, so that a damaged span cannot exhaust a reader's memory."""

_PROGRESSION = 2
"""Evenly spaced steps, the usual case, are packed as two numbers: the first step and the distance."""


@dataclass(frozen=True, slots=True)
class Columns:
    steps: NDArray[np.int64]
    patterns: NDArray[np.int32]
    times: NDArray[np.float64]
    """The times of all rows in order. The pattern of a row says how many it has."""

    def __len__(self) -> int:
        return len(self.steps)


def joined(parts: list[Columns]) -> Columns:
    return Columns(
        np.concatenate([part.steps for part in parts]),
        np.concatenate([part.patterns for part in parts]),
        np.concatenate([part.times for part in parts]),
    )


def packed(columns: Columns) -> tuple[bytes, bytes, bytes]:
    steps, patterns = columns.steps.astype(STEPS), columns.patterns.astype(PATTERNS)
    if len(steps) > _PROGRESSION and len(np.unique(np.diff(steps))) == 1:
        steps = np.array([steps[0], steps[1] - steps[0]], STEPS)
    if (patterns == patterns[:1]).all():
        patterns = patterns[:1]
    return steps.tobytes(), patterns.tobytes(), columns.times.astype(TIMES).tobytes()


def unpacked(first: int, last: int, steps: bytes, patterns: bytes, times: bytes) -> Columns:
    """The columns of the rows from `first` to `last`. The number of times is not checked here."""
    count = last - first + 1
    try:
        its_steps, its_patterns = np.frombuffer(steps, STEPS), np.frombuffer(patterns, PATTERNS)
        its_times = np.frombuffer(times, TIMES)
    except (TypeError, ValueError) as error:
        raise RunError(f"rows {first} to {last} are damaged ({error})") from error
    if _PROGRESSION < count <= MOST_ROWS and len(its_steps) == _PROGRESSION:
        its_steps = its_steps[0] + its_steps[1] * np.arange(count)
    if 1 < count <= MOST_ROWS and len(its_patterns) == 1:
        its_patterns = np.repeat(its_patterns, count)
    if not len(its_steps) == len(its_patterns) == count:
        raise RunError(f"rows {first} to {last} are damaged: they are not {count} rows")
    return Columns(its_steps, its_patterns, its_times)
