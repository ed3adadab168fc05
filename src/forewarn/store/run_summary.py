"""summary.json: a run in a few numbers. Its writer keeps it, so that listing runs opens no database."""

from __future__ import annotations

import logging
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from sqlite3 import Connection
from typing import Any

import numpy as np

from forewarn.codec import Noun
from forewarn.files import read_regular, replacing
from forewarn.metrics import BUILT_IN, catalogue_of
from forewarn.standing import run_state
from forewarn.store import database, manifest
from forewarn.store.catalog import Catalog
from forewarn.store.chunks import FLOATS
from forewarn.store.columns import TIMES
from forewarn.store.newest import MOST_BYTES, NewestReadings, newest_of
from forewarn.store.plain import decoded, encoded
from forewarn.store.reader import Run, open_run
from forewarn.store.records import INSERT_EVENT, INSERT_RECORD, Event, event_from, from_text
from forewarn.store.tail import INSERT_ROW, TailRow
from forewarn.types import Alert, AlertState, Severity, Values

NAME = "summary.json"
_FILES = (manifest.NAME, database.NAME, f"{database.NAME}-wal")
"""The files that a summary describes. It is valid until one of them changes."""
_LOSS = "train/loss"

_log = logging.getLogger("forewarn")

Item = tuple[str, Sequence[Any]]
"""A statement and its parameters."""
Stamp = dict[str, list[int]]


@dataclass(frozen=True, slots=True)
class Summary(Noun):
    """The progress and state of a run."""

    model: str
    num_steps: int
    last_step: int | None
    last_loss: float | None
    updated: float
    """When the newest block was measured, or the run began, in seconds since the epoch."""
    end: str | None
    """Why the run ended; None while it runs, or if it was killed."""
    severities: Mapping[str, int]
    """Number of alerts of each severity; each alert counts at its worst severity."""

    @property
    def state(self) -> str:
        """The state of the run in one word, as in `run_state`."""
        return run_state(self.end, self.updated)

    @property
    def num_alerts(self) -> dict[Severity, int]:
        return {severity: count for severity in Severity if (count := self.severities.get(str(severity), 0)) > 0}


def summary_of(run: Run) -> Summary:
    """The summary of a run, from its database."""
    losses = run.series(_LOSS).values[-1:].tolist() if _LOSS in run.names() and "" in run.scopes(_LOSS) else []
    return Summary(
        model=run.info.model,
        num_steps=run.num_steps,
        last_step=run.last_step,
        last_loss=losses[-1] if losses else None,
        updated=run.updated or run.info.started,
        end=None if run.end is None else run.end[0],
        severities=Counter(str(alert.severity) for alert in run.alerts()),
    )


def kept_summary(directory: Path) -> Summary | None:
    """The summary that the writer kept; None if there is none, or if the run has changed since.

    In that case read the database. Runs of earlier versions have no summary, and after a kill it may be out of date.
    """
    try:
        plain = decoded(read_regular(directory / NAME, MOST_BYTES).decode())
        summary = Summary.from_json(plain["summary"])
        loss = None if summary.last_loss is None else float(summary.last_loss)
        if math.isfinite(summary.updated) and plain["files"] == stamp_of(directory):
            return replace(summary, last_loss=loss)
    except (KeyError, OSError, OverflowError, RecursionError, TypeError, ValueError):
        pass
    return None


def stamp_of(directory: Path) -> Stamp:
    """The size and modification time of each file. An empty log counts as missing."""
    stamp: Stamp = {}
    for name in _FILES:
        try:
            status = os.stat(directory / name)
        except FileNotFoundError:
            continue
        if status.st_size:
            stamp[name] = [status.st_size, status.st_mtime_ns]
    return stamp


class SummaryKeeper:
    """Follows the writes to a run, batch by batch, and keeps its summary up to date.

    It never raises. If the summary cannot be kept, readers use the database.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._catalog = Catalog()
        self._summary: Summary | None = None
        self._newest = NewestReadings(BUILT_IN)
        self._firing: dict[tuple[str, str, int], Alert] = {}
        self._written: tuple[Stamp, Summary] | None = None
        self._guarded(self._begin)

    def take(self, connection: Connection, batch: Sequence[Item]) -> None:
        """Add statements that were just executed."""
        if self._summary is not None:
            self._guarded(self._take, connection, batch)

    def write(self) -> None:
        """Write the summary to its file."""
        if self._summary is not None:
            self._guarded(self._write, self._summary)

    def _guarded(self, work: Callable[..., None], *arguments: Any) -> None:
        try:
            work(*arguments)
        except Exception:
            _log.debug("the summary of %s is no longer kept", self._directory, exc_info=True)
            self._summary = None

    def _begin(self) -> None:
        with open_run(self._directory) as run:
            self._summary = summary_of(run)
            alerts = {_episode(alert): alert for alert in run.alerts()}
            self._newest = NewestReadings(catalogue_of(run.info))
        self._severities = {episode: str(alert.severity) for episode, alert in alerts.items()}
        self._firing = {episode: alert for episode, alert in alerts.items() if alert.state is AlertState.FIRING}

    def _take(self, connection: Connection, batch: Sequence[Item]) -> None:
        rows = [parameters for statement, parameters in batch if statement is INSERT_ROW]
        alerts = [
            from_text(Alert, parameters[3])
            for statement, parameters in batch
            if statement is INSERT_RECORD and parameters[2] == "alert"
        ]
        if alerts:
            self._severities |= {_episode(alert): str(alert.severity) for alert in alerts}
            self._change(severities=Counter(self._severities.values()))
        for alert in alerts:
            self._firing.pop(_episode(alert), None)
            if alert.state is AlertState.FIRING:
                self._firing[_episode(alert)] = alert
        for statement, parameters in batch:
            if statement is INSERT_EVENT:
                self._take_event(event_from(*parameters))
        if rows:
            self._catalog.refresh(connection)
            self._take_rows(connection, rows)
            self._take_newest(connection, rows)

    def _take_event(self, event: Event) -> None:
        if event.kind in ("end", "resume"):
            self._change(end=str(event.data.get("reason", "")) if event.kind == "end" else None)

    def _change(self, **changes: Any) -> None:
        assert self._summary is not None
        self._summary = replace(self._summary, **changes)

    def _take_rows(self, connection: Connection, rows: Sequence[Sequence[Any]]) -> None:
        assert self._summary is not None
        num_steps, last = self._summary.num_steps, self._summary.last_step
        for _, step, *_ in rows:
            if last is not None and step < last:
                return self._begin()  # only the database knows whether this step is new
            num_steps += step != last
            last = step
        self._change(num_steps=num_steps, last_step=last)
        newest_first = (TailRow(*row) for row in reversed(rows))
        for loss in (loss for row in newest_first for loss in self._losses(connection, row)):
            self._change(last_loss=loss)
            break
        for times in (times for *_, times, _ in reversed(rows) if times):
            newest = float(np.frombuffer(times, TIMES)[-1])
            if math.isfinite(newest):  # imported runs may have no times
                self._change(updated=newest)
            break
        return None

    def _take_newest(self, connection: Connection, rows: Sequence[Sequence[Any]]) -> None:
        """The newest reading of each metric; rows of the same pattern have the same metrics."""
        patterns: set[int] = set()
        blocks: dict[int, Values] = {}
        for row in (TailRow(*row) for row in reversed(rows)):
            if row.pattern in patterns:
                continue
            patterns.add(row.pattern)
            pattern = self._catalog.patterns[row.pattern]
            end = pattern.num_values
            for number in reversed(pattern.layouts):
                begin = end - self._catalog.layouts[number].num_scopes
                blocks.setdefault(number, np.frombuffer(row.body, FLOATS)[begin:end])
                end = begin
        for number, values in reversed(blocks.items()):  # the newest last
            layout = self._catalog.layouts[number]
            self._newest.take(layout.name, self._catalog.scopes_of(layout, connection), values)

    def _losses(self, connection: Connection, row: TailRow) -> Iterator[float]:
        """The training losses in a row, last one first."""
        pattern = self._catalog.patterns[row.pattern]
        end = pattern.num_values
        for number in reversed(pattern.layouts):
            layout = self._catalog.layouts[number]
            end -= layout.num_scopes
            if layout.name == _LOSS and "" in (scopes := self._catalog.scopes_of(layout, connection)):
                yield float(np.frombuffer(row.body, FLOATS)[end + scopes.index("")])

    def _write(self, summary: Summary) -> None:
        state = stamp_of(self._directory), summary
        if state != self._written:
            newest = newest_of(self._newest.readings(), self._firing.values())
            plain = {"files": state[0], "summary": summary.to_json(), "newest": newest.to_json()}
            with replacing(self._directory / NAME, durable=False) as file:
                file.write(encoded(plain).encode())
            self._written = state


def _episode(alert: Alert) -> tuple[str, str, int]:
    return alert.code, alert.scope, alert.since
