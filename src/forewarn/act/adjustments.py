"""The advice of open warnings about epochs, applied when the loop asks for it by `monitor.adjust`."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from forewarn.act.learning_rate import scale_lr
from forewarn.codec import Noun
from forewarn.judge.families import Family
from forewarn.judge.rules import family_of
from forewarn.measure.exchange import Exchange
from forewarn.types import Action, Alert, Severity

_log = logging.getLogger("forewarn")

ADJUSTMENTS = frozenset({"lower_lr", "raise_weight_decay"})
"""Remedies that can be applied to a running job. Raising the lr is not one: too large a step cannot be undone."""

Identity = tuple[str, str, int]
"""The code, scope and first step of an alert: one finding."""


@dataclass(frozen=True, slots=True)
class Adjustment(Noun):
    """A remedy to apply, and the alert that advises it."""

    code: str
    scope: str
    action: str
    before: float
    after: float


class Adjuster:
    """Applies the advice of each finding once; in a distributed run, all ranks do what rank 0 decides."""

    def __init__(self, optimizers: Sequence[Any], exchange: Exchange | None) -> None:
        self._optimizers = tuple(optimizers)
        self._exchange = exchange
        self._handled: set[Identity] = set()

    def adjust(self, step: int, firing: Iterable[Alert], scheduler: Any) -> tuple[Action, ...]:
        """Apply the advice of open alerts about epochs. In a distributed run, every rank calls it after this step."""
        about_epochs = [alert for alert in firing if family_of(alert.code) is Family.EVALUATION]
        advised = self._agreed(step, adjustments(about_epochs, self._handled))
        return adjust(advised, self._optimizers, scheduler, step)

    def leave(self, alerts: Iterable[Alert]) -> None:
        """Take these alerts for handled."""
        self._handled = {(alert.code, alert.scope, alert.since) for alert in alerts}

    def _agreed(self, step: int, advised: list[Adjustment]) -> list[Adjustment]:
        """The adjustments that all ranks make at this step: those of rank 0, and none if they are not in contact."""
        if self._exchange is None:
            return advised
        word = self._exchange.word_of_rank_0(step, json.dumps([advice.to_json() for advice in advised]).encode())
        if word is None:
            _log.warning("nothing is adjusted: the monitors of the ranks are not connected, so they could not agree")
            return []
        return [Adjustment.from_json(advice) for advice in json.loads(word)]

    def state(self) -> list[list[Any]]:
        """The findings acted on, as plain values."""
        return sorted(map(list, self._handled))

    def load_state(self, state: Iterable[Sequence[Any]]) -> None:
        """Continue with the `state` of an earlier run."""
        self._handled = {(code, scope, int(since)) for code, scope, since in state}


def adjustments(alerts: Sequence[Alert], handled: set[Identity]) -> list[Adjustment]:
    """The remedies of warnings and critical alerts, most important first.

    Only remedies marked `opt_in` that are in `ADJUSTMENTS` count. `handled` holds the findings already acted on and is
    updated, so that none is acted on twice.
    """
    advised: list[Adjustment] = []
    for alert in alerts:
        identity = (alert.code, alert.scope, alert.since)
        if alert.severity < Severity.WARNING or identity in handled:
            continue
        handled.add(identity)
        for remedy in alert.remedies:
            before, after = remedy.parameters.get("from"), remedy.parameters.get("to")
            if not (isinstance(before, int | float) and isinstance(after, int | float)):
                continue
            if remedy.safety == "opt_in" and remedy.action in ADJUSTMENTS:
                advised.append(Adjustment(alert.code, alert.scope, remedy.action, float(before), float(after)))
    return advised


def adjust(advised: Iterable[Adjustment], optimizers: Sequence[Any], scheduler: Any, step: int) -> tuple[Action, ...]:
    """Apply adjustments, each kind of them once."""
    actions: dict[str, Action] = {}
    for advice in advised:
        changed = _applied(advice, optimizers, scheduler) if advice.action in ADJUSTMENTS - actions.keys() else None
        if changed is not None:
            numbers = {"from": changed[0], "to": changed[1]}
            actions[advice.action] = Action(step, advice.code, advice.scope, advice.action, numbers)
    return tuple(actions.values())


def _applied(advice: Adjustment, optimizers: Sequence[Any], scheduler: Any) -> tuple[float, float] | None:
    """The largest value before and after; None if there is nothing to change."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    if advice.action == "raise_weight_decay":
        return _set_weight_decay(groups, advice.after)
    return scale_lr(optimizers, [scheduler], advice.after / advice.before) if advice.before > 0 else None


def _set_weight_decay(groups: Sequence[dict[str, Any]], to: float) -> tuple[float, float] | None:
    """Set the decay of every group, except groups exempt from decay while others are not."""
    able = [group for group in groups if "weight_decay" in group]
    decayed = [group for group in able if group["weight_decay"] > 0] or able
    now = max((group["weight_decay"] for group in decayed), default=to)
    if now >= to:
        return None
    for group in decayed:
        group["weight_decay"] = to
    return now, to
