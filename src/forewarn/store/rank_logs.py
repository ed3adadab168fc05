"""What each rank of a distributed run leaves behind: `ranks/rank-1.json`, a record of fixed size, kept up to date."""

from __future__ import annotations

import logging
import os
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from forewarn.codec import Noun
from forewarn.files import read_regular
from forewarn.store.plain import decoded, encoded

FOLDER = "ranks"
_NAME = re.compile(r"rank-(\d{1,7})\.json")
_NUM_BYTES = 2048
_MOST_LOGS = 1 << 16
_MOST_CHARACTERS = 200
_MOST_ENDS = 8
_PAUSE_SECONDS = 1.0
_SILENT_SECONDS = 30.0
"""After this time without a step or a word, the ranks may all have ended."""

_log = logging.getLogger("forewarn")


@dataclass(frozen=True, slots=True)
class RankLog(Noun):
    """How far a rank came, and what it saw of the others."""

    rank: int
    step: int = -1
    """The last step that it completed and exchanged."""
    time: float = 0.0
    """When that was, in seconds since the epoch."""
    end: str = ""
    """Why its monitor was closed; empty if it was not."""
    ended: float = 0.0
    saw_end: Mapping[str, float] = field(default_factory=dict)
    """When it noticed that the processes of other ranks had ended."""


@dataclass(frozen=True, slots=True)
class FirstEnd(Noun):
    """The end of a distributed run, as its ranks saw it."""

    ranks: tuple[int, ...]
    """The rank that ended first; several if their ends were noticed at the same time, none if no end was noticed."""
    step: int
    """The last step that all ranks are known to have completed; -1 if there is none."""
    reason: str
    """Why its monitor was closed; empty if it was not, because its process was killed or crashed.

    If no rank is named: `LOST_CONTACT` if one has ended while others went on, empty if all fell silent.
    """


class RankLogWriter:
    """Keeps the log of one rank. It may be called from any thread, and never raises because of the disk."""

    def __init__(self, rank: int, flush: Callable[[], None] | None = None) -> None:
        """`flush` saves the rest of the run as soon as another rank has ended: this process may be the next."""
        self._log = RankLog(rank)
        self._flush = flush
        self._descriptor: int | None = None
        self._written = 0.0
        self._lock = threading.Lock()
        self._process = os.getpid()

    def begin(self, directory: Path, num_ranks: int) -> None:
        """Start the log in the directory of a run."""
        folder = directory / FOLDER
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_NOFOLLOW", 0)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(folder / f"rank-{self._log.rank}.json", flags, 0o666)
            if self._log.rank == 0:
                delete_rank_logs(directory, at_least=num_ranks)  # of an earlier start with more ranks
        except OSError as error:
            _log.warning("rank %d keeps no log in %s: %s", self._log.rank, folder, error.strerror)
            return
        weakref.finalize(self, os.close, self._descriptor)
        self._write()
        self._written = 0.0

    def completed(self, step: int) -> None:
        """All ranks have completed a step. It is written at most once a second, and with the end of another rank."""
        self._log = replace(self._log, step=step, time=time.time())
        if self._log.time - self._written >= _PAUSE_SECONDS:
            self._write()

    def saw_end(self, ranks: Sequence[int]) -> None:
        """The processes of other ranks have ended; which of them was first is unknown if there are several."""
        if len(self._log.saw_end) < _MOST_ENDS:
            now = dict.fromkeys(map(str, ranks[:_MOST_ENDS]), time.time())
            self._log = replace(self._log, saw_end={**now, **self._log.saw_end})
            self._write()
        if self._flush is not None:
            self._flush()

    def close(self, reason: str) -> None:
        if not self._log.end:
            self._log = replace(self._log, end=reason[:_MOST_CHARACTERS] or "closed", ended=time.time())
            self._write()

    def _write(self) -> None:
        if self._descriptor is None or os.getpid() != self._process:
            return
        with self._lock:
            self._written = time.time()
            content = encoded(self._log.to_json()).encode(errors="replace")
            try:
                os.lseek(self._descriptor, 0, os.SEEK_SET)
                os.write(self._descriptor, content.ljust(_NUM_BYTES - 1) + b"\n")
            except OSError:  # a full disk; the run itself reports it
                self._descriptor = None


def rank_logs(directory: Path) -> list[RankLog]:
    """The logs of all ranks of a run; damaged ones are left out."""
    logs = []
    for path in _paths(directory):
        try:
            logs.append(RankLog.from_json(decoded(read_regular(path, 4 * _NUM_BYTES).decode())))
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            continue
    return sorted(logs, key=lambda log: log.rank)


LOST_CONTACT = "lost contact"
NOT_CLOSED = "not closed"
"""The end of a monitor that nobody closed, in a process that ended without an error."""

_OF_CONTACT = re.compile("gloo|nccl|ProcessGroup|TCPStore|Dist(Backend|Network|Store)Error", re.IGNORECASE)
"""What the error of a rank says whose messages another rank no longer answers; one of a data server has other words."""


def first_to_end(directory: Path) -> FirstEnd | None:
    """The rank whose process ended first, or whose monitor was closed first; None if no rank has ended.

    If all ranks are silent but none has noticed an end, as when they were killed together, it names no rank.
    """
    logs = rank_logs(directory)
    noticed: dict[int, float] = {}
    for log in logs:
        for rank, when in log.saw_end.items():
            noticed[int(rank)] = min(when, noticed.get(int(rank), when))
    last_step = max((log.step for log in logs), default=-1)
    if not noticed and not any(log.end for log in logs):
        newest = max((log.time for log in logs), default=0.0)
        is_silent = len(logs) > 1 and 0.0 < newest < time.time() - _SILENT_SECONDS
        return FirstEnd((), last_step, "") if is_silent else None
    others = [log for log in logs if not _OF_CONTACT.search(log.end)]
    is_any_lost = len(others) < len(logs)  # by another rank, which ended by an error of its own or without a word
    ends: list[tuple[float, RankLog]] = []
    for log in others:
        if log.end and not (is_any_lost and log.end == NOT_CLOSED):
            ends.append((log.ended, log))
        elif log.rank in noticed:
            ends.append((noticed[log.rank], log))
    if not ends:
        is_known = len(others) == 1
        return FirstEnd((others[0].rank,), last_step, "") if is_known else FirstEnd((), last_step, LOST_CONTACT)
    earliest = min(when for when, _ in ends)
    first = [log for when, log in ends if when == earliest]
    return FirstEnd(tuple(log.rank for log in first), last_step, first[0].end)


def delete_rank_logs(directory: Path, at_least: int = 0) -> None:
    """Delete the logs of the ranks from `at_least` on."""
    for path in _paths(directory):
        if int(path.stem.removeprefix("rank-")) >= at_least:
            path.unlink(missing_ok=True)
    if not at_least and (directory / FOLDER).is_dir() and not any((directory / FOLDER).iterdir()):
        (directory / FOLDER).rmdir()


def _paths(directory: Path) -> Iterator[Path]:
    try:
        entries = os.scandir(directory / FOLDER)
    except OSError:
        return
    with entries:
        for _, entry in zip(range(_MOST_LOGS), entries, strict=False):
            if _NAME.fullmatch(entry.name):
                yield Path(entry.path)
