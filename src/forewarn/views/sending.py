"""Sends a run to a tracker from a thread of its own: a tracker that is slow or down never holds up the training."""

from __future__ import annotations

import functools
import logging
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from numpy.typing import NDArray

from forewarn.catalogue import TRACKER_PREFIX
from forewarn.types import Action, Alert, Block, Counts, Distribution, RunEnd, RunStart
from forewarn.views.tracked import Announcement, Curves, Detail, Standing, announcements, buckets, hyperparameters
from forewarn.views.wording import deed

_log = logging.getLogger("forewarn")

MOST_ROWS = 1000
"""Maximum number of steps that wait; the oldest are left out."""
MOST_MESSAGES = 1000
"""Maximum number of alerts and the like that wait."""
SECONDS_TO_ANSWER = 60.0
"""A tracker that takes longer for one call counts as one that does not answer."""
SECONDS_AFTER_A_FAILURE, MOST_SECONDS_AFTER_A_FAILURE = 2.0, 60.0
"""The pause after a failure; it doubles while failures go on."""
SECONDS_AT_THE_END = 10.0
"""How long the end of a run waits for the tracker."""

_SECRET = re.compile(r"//[^/@\s]+@")
"""User and password in a URL."""


@dataclass(frozen=True, slots=True)
class Row:
    """One step as a tracker gets it."""

    step: int
    time: float
    """Seconds since the epoch."""
    values: Mapping[str, float]
    histograms: Mapping[str, tuple[Counts, NDArray[Any]]]
    """Counts and edges, as numpy has them."""


class Sender:
    """Passes rows and messages to functions that may take long or raise, in a thread of its own.

    Messages come before the rows that wait with them. Rows that cannot be written are given up, messages are tried
    again. `is_over` says that the tracker takes nothing more: then the thread ends.
    """

    def __init__(
        self,
        tracker: str,
        write: Callable[[list[Any]], None],
        is_over: Callable[[], bool],
        seconds_apart: float,
    ) -> None:
        self.is_over = False
        self._tracker = tracker
        self._write = write
        self._asks_if_over = is_over
        self._apart = seconds_apart
        self._failure = ""
        """The error of the last call, if it failed."""
        self._num_left_out = 0
        self._called_at: float | None = None
        """When the call began that is under way."""
        self._rows: deque[Any] = deque()
        self._messages: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._work, name=f"forewarn {tracker}", daemon=True)
        self._thread.start()

    @property
    def trouble(self) -> str:
        """Why not everything reaches the tracker, in words; empty if it does."""
        called_at = self._called_at
        if called_at is not None and time.monotonic() - called_at > SECONDS_TO_ANSWER:
            return f"{self._tracker} has not answered for {SECONDS_TO_ANSWER:.0f} seconds"
        if self._failure:
            return f"{self._tracker} takes no readings ({self._failure})"
        if self._num_left_out:
            return f"{self._tracker} is slower than the training, so it does not get the readings of every step"
        return ""

    def put(self, row: Any, messages: Sequence[Callable[[], None]] = ()) -> None:
        """Send a row, unless it is None, and messages."""
        with self._changed:
            if self.is_over:
                return
            if row is not None:
                self._rows.append(row)
                if len(self._rows) > MOST_ROWS:
                    self._rows.popleft()
                    self._num_left_out += 1
            self._messages += messages
            while len(self._messages) > MOST_MESSAGES:
                self._messages.popleft()
            self._changed.notify_all()

    def close(self) -> None:
        """Send what waits, for a few seconds at most."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(SECONDS_AT_THE_END)
        num_waiting = len(self._rows) + len(self._messages)
        if self._thread.is_alive():
            _log.warning("%s did not take everything within %.0f s", self._tracker, SECONDS_AT_THE_END)
        elif num_waiting and not self.is_over:
            _log.warning("%s did not take everything (%s)", self._tracker, self._failure)

    def _work(self) -> None:
        pause = SECONDS_AFTER_A_FAILURE
        while (work := self._next()) is not None:
            rows, messages = work
            is_sent = self._send(rows, messages)
            if self.is_over:
                break
            with self._changed:
                self._messages.extendleft(reversed(messages))  # those that are left
                if not is_sent and self._closing:
                    break
                self._changed.wait_for(lambda: self._closing, self._apart if is_sent else pause)
            pause = SECONDS_AFTER_A_FAILURE if is_sent else min(2 * pause, MOST_SECONDS_AFTER_A_FAILURE)

    def _next(self) -> tuple[list[Any], deque[Callable[[], None]]] | None:
        """All that waits, as soon as there is something; None once nothing more will come."""
        with self._changed:
            self._changed.wait_for(lambda: self._rows or self._messages or self._closing)
            if not self._rows and not self._messages:
                return None
            rows, self._rows = list(self._rows), deque()
            messages, self._messages = self._messages, deque()
            return rows, messages

    def _send(self, rows: list[Any], messages: deque[Callable[[], None]]) -> bool:
        """Whether all of it was taken; messages that were are removed."""
        try:
            while messages:
                self._call(messages[0])
                messages.popleft()
            if rows:
                self._call(functools.partial(self._write, rows))
        except Exception as error:
            if self._asks_if_over():
                self._end()
            else:
                self._failure = _in_words(error)
            return False
        self._failure = ""
        return True

    def _call(self, function: Callable[[], None]) -> None:
        self._called_at = time.monotonic()
        try:
            function()
        finally:
            self._called_at = None

    def _end(self) -> None:
        with self._changed:
            self.is_over = True
            self._rows.clear()
            self._messages.clear()


class TrackerView:
    """What the views of trackers share. `_find` runs in the thread of the training, all else in that of the sender."""

    tracker: ClassVar[str]
    """What people call it."""
    _advice: ClassVar[str]
    """What starts a run of this tracker."""
    _seconds_apart: ClassVar[float] = 0.0
    """The pause between two calls; what happens in between is in the second one."""

    def __init__(self, run: Any, topk: int, detail: Detail) -> None:
        self._given = run
        self._run = run
        """The run of the tracker; None until one is found."""
        self._curves = Curves(topk, detail)
        self._standing = Standing()
        self._start: RunStart | None = None
        self._sender: Sender | None = None
        self._histograms: Sequence[Distribution] = ()
        self._is_told = False
        """Whether the user was told that nothing is sent."""

    @property
    def unsent(self) -> str:
        """Why not everything reaches the tracker, in words; empty if it does."""
        return "" if self._sender is None else self._sender.trouble

    def begin(self, start: RunStart) -> None:
        self._start, self._run, self._standing, self._is_told = start, self._given, Standing(), False

    def show_histograms(self, step: int, distributions: Sequence[Distribution]) -> None:
        """Keep the histograms until `show` sends the row of their step."""
        self._histograms = distributions

    def show(self, step: int, blocks: Sequence[Block], changed: Sequence[Alert], taken: Sequence[Action]) -> None:
        histograms, self._histograms = self._histograms, ()
        sender = self._sender or self._open()
        if sender is None:
            return
        if sender.is_over:
            self._tell("the %s run is finished, so nothing more is written to it", self.tracker)
            return
        messages = list(self._news(step, changed, taken)) if changed or taken else []
        sender.put((step, blocks, histograms) if blocks or histograms else None, messages)

    def end(self, end: RunEnd) -> None:
        if self._sender is not None:
            self._sender.put(None, [functools.partial(self._note, "verdict", end.verdict)])

    def close(self) -> None:
        """Send what waits, for a few seconds at most; may be called twice."""
        sender, self._sender = self._sender, None
        if sender is not None:
            sender.close()

    def _open(self) -> Sender | None:
        """The sender to the run of the tracker; None if there is no run yet."""
        run = self._find() if self._run is None else self._run
        if run is None:
            self._tell("no %s run is active, so nothing is written to it; %s", self.tracker, self._advice)
            return None
        self._run = run
        self._sender = Sender(self.tracker, self._write_steps, self._is_over, self._seconds_apart)
        self._sender.put(None, [self._describe])
        return self._sender

    def _tell(self, message: str, *words: str) -> None:
        if not self._is_told:
            self._is_told = True
            _log.warning(message, *words)

    def _news(self, step: int, changed: Sequence[Alert], taken: Sequence[Action]) -> Iterator[Callable[[], None]]:
        for announcement in announcements(step, changed):
            yield functools.partial(self._announce, announcement)
        for tag, line in self._standing.lines(changed).items():
            yield functools.partial(self._note, f"alerts/{tag}", line)
        for action in taken:
            yield functools.partial(self._note, f"actions/{action.action}", f"step {action.step}: {deed(action)}")

    def _describe(self) -> None:
        if self._start is not None:
            self._set_up(self._start, hyperparameters(self._start.info))

    def _write_steps(self, steps: Sequence[tuple[int, Sequence[Block], Sequence[Distribution]]]) -> None:
        rows = [self._row(step, blocks, histograms) for step, blocks, histograms in steps]
        self._write([row for row in rows if row.values or row.histograms])

    def _row(self, step: int, blocks: Sequence[Block], distributions: Sequence[Distribution]) -> Row:
        return Row(
            step,
            blocks[0].time if blocks else time.time(),
            {TRACKER_PREFIX + tag: value for tag, value in self._curves.scalars(blocks)},
            {
                TRACKER_PREFIX + tag: buckets(counts, zeros)
                for tag, counts, zeros in self._curves.histograms(distributions)
            },
        )

    def _find(self) -> Any:
        """The run that is active now; None if there is none."""
        raise NotImplementedError

    def _is_over(self) -> bool:
        """Whether the run takes nothing more."""
        return False

    def _set_up(self, start: RunStart, settings: Mapping[str, float | str]) -> None:
        """Write the hyper-parameters; called before anything else, and again if it raises."""

    def _write(self, rows: Sequence[Row]) -> None:
        """Write the curves and histograms of steps."""
        raise NotImplementedError

    def _announce(self, announcement: Announcement) -> None:
        """Pass on an alert as one of the tracker's own, if it has them."""

    def _note(self, name: str, text: str) -> None:
        """Write or replace a line about the run."""
        raise NotImplementedError


def _in_words(error: Exception) -> str:
    """The first line of an error, without passwords."""
    first = str(error).strip().partition("\n")[0]
    return _SECRET.sub("//", f"{type(error).__name__}: {first}".rstrip(": "))[:200]
