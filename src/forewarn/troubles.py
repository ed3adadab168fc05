"""What fails in the monitor itself, as readings of family `monitor`, on which the rules of family X judge."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from forewarn.measure.exchange import Exchange
from forewarn.measure.probe import ONE, Reading
from forewarn.snapshots.evidence import Evidence
from forewarn.store.writer import RunWriter
from forewarn.views.view_set import ViewSet

_log = logging.getLogger("forewarn")


class Troubles:
    """Reports each failure of the monitor once, and its end."""

    def __init__(self, failures: dict[str, str], views: ViewSet, evidence: Evidence, exchange: Exchange | None) -> None:
        """`failures`: the errors of probes and views by name, to which others add."""
        self.told: set[str] = set()
        """What has been reported."""
        self._failures = failures
        self._views = views
        self._evidence = evidence
        self._exchange = exchange

    def any(self, run: RunWriter | None) -> bool:
        """Whether anything fails or has failed. Asked on every step."""
        return bool(
            self.told
            or self._failures
            or (run is not None and run.failure is not None)
            or self._views.undelivered
            or self._views.unsent
            or self._evidence.has_failed
            or self._exchange is not None
        )

    def readings(self, run: RunWriter | None) -> Iterator[Reading]:
        """Failures since the last step."""
        failed = {name: error for name, error in self._failures.items() if name not in self.told}
        if failed:
            self.told |= set(failed)
            yield Reading("monitor/probe_failed", tuple(failed), [1.0] * len(failed))
            for name, error in failed.items():
                if run is not None:
                    run.event("probe_failed", probe=name, error=error)
        yield from self._of_store(run)
        if self._changes("notify", self._views.undelivered):
            yield Reading("monitor/notify_failed", ("",), float("notify" in self.told))
        if self._changes("tracker", bool(self._views.unsent)):
            if self._views.unsent:
                _log.warning("%s; training continues", self._views.unsent)
            yield Reading("monitor/tracker_failed", ("",), float("tracker" in self.told))
        if self._changes("snapshot", self._evidence.has_failed):
            yield Reading("monitor/snapshot_failed", ("",), float(self._evidence.has_failed))
        if self._exchange is not None and self._exchange.is_lost and "ranks" not in self.told:
            self.told.add("ranks")
            yield Reading("monitor/ranks_unconnected", ONE, 2.0 if self._exchange.has_met else 1.0)
            if run is not None:
                run.event("ranks_unconnected", reason=self._exchange.off)

    def _of_store(self, run: RunWriter | None) -> Iterator[Reading]:
        failure = None if run is None else run.failure
        if run is None or not self._changes("store", failure is not None):
            return
        if failure is not None:
            _log.warning("recording stopped: %s; training continues", failure)
        else:
            _log.warning("recording continues: %s is writable again", run.path)
        yield Reading("monitor/store_failed", ("",), float(failure is not None))

    def _changes(self, what: str, fails: bool) -> bool:
        """Whether that is news, which is noted as told."""
        if fails is (what in self.told):
            return False
        self.told ^= {what}
        return True
