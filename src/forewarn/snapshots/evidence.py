"""When a run saves snapshots: if an alert becomes critical, and if somebody asks for one."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from forewarn.judge.history import History
from forewarn.measure.stopwatch import Stopwatch
from forewarn.snapshots.writing import SnapshotWriter
from forewarn.store.snapshot_folders import snapshots_in
from forewarn.store.writer import RunWriter
from forewarn.types import Alert, AlertState, Severity

_log = logging.getLogger("forewarn")


class Evidence:
    """The snapshots of one run. Saving one never raises; the time that it takes belongs to no step."""

    def __init__(self, snapshots: SnapshotWriter, stopwatch: Stopwatch) -> None:
        self.has_failed = False
        """Whether the last snapshot could not be written."""
        self._snapshots = snapshots
        self._stopwatch = stopwatch
        self._saved: set[str] = set()
        """Codes of critical alerts whose evidence is in a snapshot; their symptoms need no other."""

    def save(
        self, run: RunWriter, step: int, now: int, history: History, reason: str = "", alert: Alert | None = None
    ) -> Path | None:
        """Save the snapshot of a step while the loop is in step `now`; None if it could not be written."""
        try:
            with self._stopwatch:
                path = self._snapshots.write(run.path, step, now, history, reason, alert)
                run.event("snapshot", step=step, folder=path.name, reason=reason)
        except Exception as error:
            self.has_failed = True
            with contextlib.suppress(Exception):  # a user's logger may raise
                _log.warning("the snapshot of step %d was not written: %s; training continues", step, error)
            return None
        self.has_failed = False
        return path

    def save_critical(
        self,
        run: RunWriter,
        step: int,
        now: int,
        history: History,
        changed: Iterable[Alert],
        ranked: Callable[[Sequence[Alert]], Sequence[Alert]],
    ) -> None:
        """Save a snapshot if an alert has become critical, unless the run has enough of them."""
        settings = self._snapshots.settings
        if run.failure or self.has_failed or not settings.automatic:
            return
        critical = [
            alert for alert in changed if alert.severity is Severity.CRITICAL and alert.state is AlertState.FIRING
        ]
        causes = [alert for alert in critical if alert.follows not in self._saved]
        if causes and len(snapshots_in(run.path)) < settings.most:
            worst = ranked(causes)[0]
            self.save(run, step, now, history, worst.headline, worst)
            self._saved |= {alert.code for alert in critical}
