"""A stored run judged again: the alerts it gives, how serious they are, and a checklist of healthy training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from forewarn.config import Config
from forewarn.judge.checklist import Check, checklist
from forewarn.judge.epochs import Epoch, epochs
from forewarn.judge.history import History
from forewarn.judge.ledger import Ledger
from forewarn.judge.rules import Judge, enabled_rules, judged_metrics
from forewarn.judge.series import Series
from forewarn.store import Run
from forewarn.store.reader import StoredSeries
from forewarn.types import Alert, AlertState, Severity

HEALTHY, WARNINGS, CRITICAL = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What a stored run looks like to the rules."""

    alerts: tuple[Alert, ...]
    """Every episode that fired, in the order in which they did."""
    ranked: tuple[Alert, ...]
    """The same, most important first, those that still fire before those that were resolved."""
    causes: Mapping[tuple[str, int], str]
    """For the code and first step of each symptom: the code of the alert at the root of it."""
    checklist: tuple[Check, ...]
    last_step: int | None
    """None if the run holds no step."""
    end: tuple[str, float] | None
    """Why and when the run ended; None if it runs, or was killed."""
    epochs: tuple[Epoch, ...] = ()
    """What each epoch brought; empty if `monitor.end_epoch` was never called."""

    def cause_of(self, alert: Alert) -> str | None:
        """The code of the alert at the root of this one; None if it is a root itself."""
        return self.causes.get((alert.code, alert.since))

    @property
    def exit_code(self) -> int:
        """0 healthy, 1 warnings, 2 critical, judged by what still fires at the last step.

        An alert that was resolved counts one level lower: critical as a warning, a warning as nothing. Information
        alone is healthy.
        """
        level = max((_level(alert) for alert in self.alerts), default=0)
        return {Severity.CRITICAL: CRITICAL, Severity.WARNING: WARNINGS}.get(Severity(max(level, 1)), HEALTHY)

    @property
    def verdict(self) -> str:
        """The exit code in a word."""
        return ("healthy", "warnings", "critical")[self.exit_code]


def replay(run: Run, config: Config | None = None) -> Diagnosis:
    """Judge every stored step as the monitor did live; by the run's own config unless another is given.

    History, judge and ledger are those of the monitor and get the same float32 values, so the same config gives the
    same alerts, field by field.
    """
    config = Config.from_dict(_known(run.config, Config().to_dict())) if config is None else config
    rules = enabled_rules(config)
    history = History(config.history_window, config.detail_window, judged_metrics(rules))
    judge, ledger = Judge(rules, config, run.info), Ledger(rules)
    for step, blocks in run.steps():
        history.append(blocks)
        ledger.update(judge(step, history, blocks), history, run.info)
    alerts = ledger.alerts
    onsets = {(alert.code, alert.since): alert for alert in alerts}
    causes = {onset: cause for onset, alert in onsets.items() if (cause := ledger.cause_of(alert, alerts))}
    return Diagnosis(
        alerts=alerts,
        ranked=ledger.ranked(alerts),
        causes=causes,
        checklist=checklist(run, config, alerts),
        last_step=run.last_step,
        end=run.end,
        epochs=epochs(partial(_stored, run), config.thresholds),
    )


def _stored(run: Run, name: str) -> StoredSeries | Series:
    """The readings of a metric of the run as a whole; none if it was never read."""
    known = name in run.names() and "" in run.scopes(name)
    return run.series(name) if known else Series.of([])


def _known(stored: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """The stored settings that this version has too: a run of another version can still be judged."""
    return {
        name: _known(value, known[name]) if isinstance(value, Mapping) and known[name] else value
        for name, value in stored.items()
        if name in known
    }


def _level(alert: Alert) -> int:
    return alert.severity - 1 if alert.state is AlertState.RESOLVED else alert.severity
