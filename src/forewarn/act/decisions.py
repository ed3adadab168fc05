"""Which actions a policy takes for the open alerts, within their budgets."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from forewarn.codec import Noun
from forewarn.judge.ledger import began_at
from forewarn.policy import HARMLESS, Policy
from forewarn.types import Alert


@dataclass(frozen=True, slots=True)
class Decision(Noun):
    """An action to take because of an alert."""

    action: str
    code: str = ""
    scope: str = ""
    reason: str = ""
    dry_run: bool = False
    numbers: Mapping[str, float | str] = field(default_factory=dict)
    """What it needs to know, such as the factor for the learning rate."""


class Decisions:
    """Decides what is done, and counts it."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._clock = 0
        """Number of steps judged. Unlike the step, it never goes back."""
        self._counts: dict[str, int] = {}
        self._last: dict[str, int] = {}
        self._notified: set[tuple[str, str, int]] = set()

    def step(self) -> None:
        self._clock += 1

    def is_spent(self, action: str) -> bool:
        """Whether the budget of an action is used up."""
        return self._counts.get(action, 0) >= self._policy.limits(action).times

    def is_cooling(self, action: str) -> bool:
        """Whether it is too soon to take an action again; in one step, only `notify` is taken for several alerts."""
        rests = self._policy.limits(action).cooldown + (action != "notify")
        return action in self._last and self._clock - self._last[action] < rests

    def take(self, action: str) -> None:
        """Count an action that was decided."""
        self._counts[action] = self._counts.get(action, 0) + 1
        self._last[action] = self._clock

    def decide(
        self, firing: Sequence[Alert], step: int, obstacle: Callable[[str, Alert], str | None]
    ) -> list[Decision]:
        """The actions for alerts that were seen at this step, most important first; one at most changes the run.

        `obstacle` says why an action cannot help with an alert; empty if it can, and None if it is at work already.
        """
        decided: list[Decision] = []
        has_changed = False
        causes = {alert.code: alert.severity for alert in firing if self._changes(alert)}
        for alert in firing:
            if alert.last != step:
                continue
            actions = self._policy.actions_for(alert)
            for action in actions:
                if action in HARMLESS and self._is_new(action, alert):
                    decided.append(self._decision(action, alert, firing))
            if has_changed or causes.get(alert.follows, -1) >= alert.severity:  # the cause is what is acted on
                continue
            chosen = self._chosen([action for action in actions if action not in HARMLESS], alert, obstacle)
            if chosen is not None:
                has_changed = True
                decided.append(self._decision(chosen, alert, firing))
        return decided

    def _changes(self, alert: Alert) -> bool:
        return any(action not in HARMLESS for action in self._policy.actions_for(alert))

    def _chosen(self, actions: Sequence[str], alert: Alert, obstacle: Callable[[str, Alert], str | None]) -> str | None:
        """The first action whose budget is left; None while it rests after its last use.

        If nothing can help, it is the first that was refused, so that the record says why.
        """
        refused: str | None = None
        for action in actions:
            if self.is_spent(action):
                continue
            reason = obstacle(action, alert)
            if reason is None:
                return None
            if not reason:
                return None if self.is_cooling(action) else action
            refused = refused or (None if action == "skip_batch" or self.is_cooling(action) else action)
        return refused

    def _is_new(self, action: str, alert: Alert) -> bool:
        """Whether a harmless action has not been taken yet for this alert at this severity, and may be taken now."""
        key = (action, f"{alert.code} {alert.scope} {alert.severity}", alert.since)
        if key in self._notified or self.is_spent(action) or self.is_cooling(action):
            return False
        self._notified.add(key)
        return True

    def _decision(self, action: str, alert: Alert, firing: Sequence[Alert]) -> Decision:
        self.take(action)
        reason = alert.headline or alert.name
        return Decision(
            action, alert.code, alert.scope, reason, self._policy.is_dry(action),
            numbers_for(action, alert, firing, self._policy),
        )  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        counts = {action: count for action, count in self._counts.items() if action != "stop"}  # a resumed run goes on
        return {"clock": self._clock, "counts": counts, "last": dict(self._last)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._clock = int(state["clock"])
        self._counts = {str(action): int(count) for action, count in state["counts"].items()}
        self._last = {str(action): int(clock) for action, clock in state["last"].items()}


def numbers_for(action: str, alert: Alert, firing: Sequence[Alert], policy: Policy) -> dict[str, float | str]:
    """What an action needs to know from the alert: its own advice, where it gives any."""
    advice = {remedy.action: remedy.parameters for remedy in alert.remedies}
    if action == "lower_lr":
        now, after = advice.get(action, {}).get("from"), advice.get(action, {}).get("to")
        settings = policy.lower_lr
        if isinstance(now, int | float) and isinstance(after, int | float) and 0 < after < now:
            is_earlier = "lr_before" in alert.finding.evidence
            return {"factor": after / now if is_earlier else max(settings.least_factor, after / now)}
        return {"factor": settings.factor}
    if action in ("lower_clip", "raise_clip"):
        limit = advice.get("clip_gradient", {}).get("max_norm", math.nan)
        factor = getattr(policy, action).factor
        return {"factor": 1 / factor if action == "lower_clip" else factor, "limit": limit}
    if action == "rebalance":
        for name in ("raise_task_weight", "lower_task_weight"):
            parameters = advice.get(name, {})
            now, after, task = parameters.get("from"), parameters.get("to"), parameters.get("task")
            if isinstance(now, int | float) and isinstance(after, int | float) and isinstance(task, str) and now > 0:
                return {"task": task, "factor": after / now}
        return {}
    if action == "roll_back":
        episode = [alert, *(other for other in firing if other.follows == alert.code)]
        return {"began": min(min(one.since, began_at(one.finding)) for one in episode)}
    return {}
