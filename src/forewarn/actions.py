"""What a monitor may do to a run: nothing, unless a policy says so."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from forewarn.types import Action, Alert, Severity, State

_KNOWN = frozenset({"stop"})


@dataclass(frozen=True, slots=True)
class Policy:
    """The actions that a monitor may take by itself; by default it only tells."""

    allow: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if unknown := set(self.allow) - _KNOWN:
            raise ValueError(
                f"unknown action {sorted(unknown)[0]!r} in the policy; known are {', '.join(sorted(_KNOWN))}"
            )

    @classmethod
    def of(cls, policy: str | Policy) -> Policy:
        """What `watch(policy=…)` accepts: a Policy, `"observe"` or `"stop"`."""
        if isinstance(policy, Policy):
            return policy
        named = {"observe": cls(), "stop": cls(frozenset({"stop"}))}
        if policy not in named:
            raise ValueError(f"policy must be 'observe', 'stop' or a forewarn.Policy, not {policy!r}")
        return named[policy]


def act(changed: Iterable[Alert], policy: Policy, step: int) -> tuple[Action, ...]:
    """Do what the policy allows about the alerts that changed; a critical one asks the loop to stop."""
    if "stop" not in policy.allow:
        return ()
    critical = [alert for alert in changed if alert.severity is Severity.CRITICAL and alert.state is State.FIRING]
    return tuple(Action(step, alert.code, alert.scope, "stop") for alert in critical)
