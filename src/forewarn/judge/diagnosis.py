"""Judges a stored run again: its alerts, how serious they are, and a checklist of healthy training."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from forewarn.judge import objective
from forewarn.judge.checklist import Check, checklist
from forewarn.judge.epochs import Epoch, epochs
from forewarn.judge.forecast import LossCurve
from forewarn.judge.judgement import RuleSet
from forewarn.judge.ledger import Ledger
from forewarn.judge.rules.evaluation import GeneralizationGap, SlowImprovement, ValidationPlateau
from forewarn.judge.series import Series
from forewarn.judge.stored_steps import judged_steps
from forewarn.standing import HEALTHY, TOO_EARLY, VERDICTS, exit_code, verdict
from forewarn.store import Run
from forewarn.store.reader import StoredSeries
from forewarn.types import Alert, AlertState, RuleInfo


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What a stored run looks like to the rules."""

    alerts: tuple[Alert, ...]
    """Every episode that fired, in order of firing."""
    ranked: tuple[Alert, ...]
    """The same alerts, most important first: a cause comes before its symptoms, resolved or not."""
    causes: Mapping[tuple[str, int], str]
    """For the code and first step of each symptom: the code of its root cause."""
    checklist: tuple[Check, ...]
    last_step: int | None
    """None if the run holds no step."""
    end: tuple[str, float] | None
    """Why and when the run ended; None if it is still running or was killed."""
    epochs: tuple[Epoch, ...] = ()
    """The result of each epoch; empty if `monitor.end_epoch` was never called."""
    not_judged: tuple[RuleInfo, ...] = ()
    """Rules that judged the run live but are not loaded here; their alerts are the recorded ones."""
    is_falling: bool | None = None
    """Whether the training loss is falling; None if there are too few losses."""
    has_loss: bool = True
    """False if the log of an imported run has no training loss."""

    def cause_of(self, alert: Alert) -> str | None:
        """The code of the root cause of this alert; None if it has no cause."""
        return self.causes.get((alert.code, alert.since))

    @property
    def exit_code(self) -> int:
        """0 healthy, 1 warnings, 2 critical."""
        return exit_code(self.alerts, self.is_falling)

    @property
    def verdict(self) -> str:
        """The run in a few words. If a rule that judged it live is missing here, the words say so."""
        words = TOO_EARLY
        if self.last_step is not None:
            words = verdict(self.alerts, self.is_falling, has_loss=self.has_loss)
        return f"{words} by the rules loaded here" if self.not_judged and words == VERDICTS[HEALTHY] else words


def replay(run: Run, rule_set: RuleSet) -> Diagnosis:
    """Judge every stored step as the monitor did live.

    `Config.from_stored(run.config).rule_set()` is the rule set of the live run. History, judge and ledger are the same
    code and get the same float32 values, so the same rule set gives the same alerts, field by field. For rules that are
    not in the rule set, the alerts recorded live are used.
    """
    ledger = judged_steps(run, rule_set)
    missing = {rule.code for rule in rule_set.not_loaded(run.info)}
    recorded = [alert for alert in recorded_alerts(run) if alert.code in missing] if missing else []
    return _diagnosis(run, rule_set, ledger, [*ledger.alerts, *recorded])


def diagnose(run: Run, rule_set: RuleSet) -> Diagnosis:
    """The diagnosis of a run by the alerts that it recorded live; one that was not judged live is replayed.

    This takes milliseconds, where a replay of many steps takes seconds.
    """
    if not run.info.rules:
        return replay(run, rule_set)
    return _diagnosis(run, rule_set, Ledger(rule_set.rules), recorded_alerts(run))


def recorded_alerts(run: Run) -> list[Alert]:
    """The alerts that fired live. When an open one was last seen is not recorded: the last step stands for it."""
    last_step = run.last_step or 0
    return [
        alert if alert.state is AlertState.RESOLVED else dataclasses.replace(alert, last=max(alert.last, last_step))
        for alert in run.alerts()
        if alert.fired is not None
    ]


def _diagnosis(run: Run, rule_set: RuleSet, ledger: Ledger, unsorted: Sequence[Alert]) -> Diagnosis:
    alerts = tuple(sorted(unsorted, key=lambda alert: (alert.fired or 0, alert.code, alert.scope)))
    curve = _loss_curve(run)
    is_falling = _is_falling(run, curve)
    return Diagnosis(
        alerts=alerts,
        ranked=ledger.ranked(alerts),
        causes=ledger.causes(alerts),
        checklist=checklist(run, rule_set, alerts, curve, is_falling),
        last_step=run.last_step,
        end=run.end,
        epochs=epochs(
            partial(_stored, run),
            poor=rule_set.settings_of(SlowImprovement).improvement,
            severe=rule_set.settings_of(GeneralizationGap).gap,
            change=rule_set.settings_of(ValidationPlateau).change,
            window=rule_set.settings_of(ValidationPlateau).window,
        ),
        not_judged=rule_set.not_loaded(run.info),
        is_falling=is_falling,
        has_loss=has_loss(run),
    )


def stored_is_falling(run: Run) -> bool | None:
    """Whether the loss of a run has fallen; None if that cannot be told, or if the run improves something else."""
    return _is_falling(run, _loss_curve(run))


def has_loss(run: Run) -> bool:
    """False if the run comes from a log without a training loss."""
    return not run.info.imported_from or "train/loss" in run.names()


def _loss_curve(run: Run) -> LossCurve:
    losses = _stored(run, "train/loss")
    return LossCurve.of(losses.steps.tolist(), losses.values.tolist())


def _is_falling(run: Run, curve: LossCurve) -> bool | None:
    loss, separate = (Series.of(_stored(run, name).values) for name in ("train/loss", "update/separate_losses"))
    return objective.is_falling(curve, loss, separate, run.info)


def _stored(run: Run, name: str) -> StoredSeries | Series:
    """The readings of a metric of the run as a whole; empty if it was never recorded."""
    was_read = name in run.names() and "" in run.scopes(name)
    return run.series(name) if was_read else Series.of([])
