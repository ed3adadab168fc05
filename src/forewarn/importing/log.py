"""What a log holds: readings by the names that its tool gave them, within limits."""

from __future__ import annotations

import codecs
import io
import math
import os
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from forewarn.files import check_regular

MOST_READINGS = 20_000_000
"""Maximum number of readings of one log; each takes 24 bytes of memory."""
MOST_NAMES = 50_000
MOST_NAME_CHARACTERS = 500
MOST_LINE_BYTES = 4 << 20
"""Longer lines of a text log are no readings."""
_MOST_STEP = 1 << 53
_BYTES_PER_NEWS = 1 << 20


class LogError(ValueError):
    """The file is not a log that can be read. The message says what was found and what to do."""


@dataclass(slots=True)
class Track:
    """The readings under one name, in the order of the log."""

    steps: array[int] = field(default_factory=lambda: array("q"))
    times: array[float] = field(default_factory=lambda: array("d"))
    """Seconds since the epoch; NaN where the log has none."""
    values: array[float] = field(default_factory=lambda: array("d"))

    def __len__(self) -> int:
        return len(self.steps)


@dataclass(slots=True)
class Log:
    """Everything that was read from the files of one run."""

    tool: str
    """The tool that wrote it, or the kind of file, such as `TensorBoard`."""
    tracks: dict[str, Track] = field(default_factory=dict)
    hyperparameters: dict[str, Any] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What forewarn itself knew of the run, if the log comes from forewarn."""
    units: dict[str, str] = field(default_factory=dict)
    """The unit behind the numbers of a name, such as `ms`, if the log has one."""
    notes: list[str] = field(default_factory=list)
    """What a person should know about the reading, such as where a file is damaged."""
    step_is_epoch: bool = False
    """Whether the log counts epochs instead of steps."""
    tell: Callable[[int], None] = lambda _: None
    """Called with the number of bytes read since the last call."""
    _num_readings: int = 0

    def add(self, name: str, step: int, time: float, value: float) -> None:
        """Add one reading. Raises LogError if there are more than any training writes."""
        if not 0 <= step < _MOST_STEP:
            return
        track = self.tracks.get(name)
        if track is None:
            if not name or len(name) > MOST_NAME_CHARACTERS:
                return
            if len(self.tracks) >= MOST_NAMES:
                raise LogError(f"it has more than {MOST_NAMES:,} names")
            track = self.tracks[name] = Track()
        self._num_readings += 1
        if self._num_readings > MOST_READINGS:
            raise LogError(f"it has more than {MOST_READINGS:,} readings")
        track.steps.append(step)
        track.times.append(time)
        track.values.append(value)

    def number_unnumbered(self) -> None:
        """Count readings instead of steps if the log gives all of them the same step, as without `global_step`."""
        several = [track for track in self.tracks.values() if len(track) > 1]
        if several and all(min(track.steps) == max(track.steps) for track in several):
            for track in several:
                track.steps = array("q", range(len(track)))
            self.note("it gives all readings the same step: a step below is the number of the reading")

    def note(self, sentence: str) -> None:
        """Add a note once."""
        if sentence not in self.notes:
            self.notes.append(sentence)


def number(value: Any) -> float | None:
    """A value of JSON, or the text of a number, as a number; None if it is neither."""
    if isinstance(value, bool):
        return float(value)
    try:
        if isinstance(value, int | float):
            return float(value)
        if isinstance(value, str) and len(value) <= 40 and "_" not in value:
            return float(value)
    except (OverflowError, ValueError):
        return None
    return None


def whole_number(value: Any) -> int | None:
    """The same for a step: None if it is not a whole number."""
    step = number(value)
    return int(step) if step is not None and math.isfinite(step) and step == int(step) else None


def opened_log(path: Path) -> IO[bytes]:
    """A file of a log, open for reading. Raises OSError if it is not a regular file, because a FIFO would hang."""
    check_regular(path)
    return open(path, "rb")


def lines_of(path: Path, log: Log) -> Iterator[str]:
    """The lines of a text file. Lines that are too long are left out, and a note says so."""
    with opened_log(path) as file:
        read = 0
        if wide := encoding_of(file.read(2)):
            yield from _wide_lines(path, wide, log)
            return
        file.seek(0)
        while line := file.readline(MOST_LINE_BYTES + 1):
            read += len(line)
            if read >= _BYTES_PER_NEWS:
                log.tell(read)
                read = 0
            if len(line) > MOST_LINE_BYTES:
                log.note(f"{path.name} has a line longer than {MOST_LINE_BYTES >> 20} MB, which was left out")
                while line and not line.endswith(b"\n"):
                    line = file.readline(MOST_LINE_BYTES)
                continue
            yield line.decode("utf-8", "replace")
        log.tell(read)


def encoding_of(head: bytes) -> str:
    """`utf-16` if a file begins like the text that Windows' PowerShell writes; otherwise empty."""
    return "utf-16" if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else ""


def _wide_lines(path: Path, encoding: str, log: Log) -> Iterator[str]:
    """The lines of a text file in UTF-16."""
    with io.TextIOWrapper(opened_log(path), encoding, errors="replace") as file:
        while line := file.readline(MOST_LINE_BYTES):
            log.tell(2 * len(line))
            yield line


def size_of(path: Path) -> int:
    """The size of a file in bytes; 0 if it cannot be told."""
    try:
        return os.stat(path).st_size
    except OSError:
        return 0
