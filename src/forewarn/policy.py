"""What a monitor may do to a run by itself: which actions, for which alerts, and how often."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, Self

from forewarn.judge.families import BY_LETTER, Family
from forewarn.judge.registry import Rule
from forewarn.judge.rules import all_rules, find_rule
from forewarn.settings import Settings, between
from forewarn.suggestions import did_you_mean
from forewarn.types import Alert, Severity


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits(Settings):
    """How often an action may be taken."""

    times: int = between(1, 0)
    """Times per run; 0 never takes it."""
    cooldown: int = between(0, 0)
    """Steps after it was taken before it is taken again."""
    dry_run: bool = False
    """Record what would have been done, without doing it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Notify(Limits):
    """Send the alert to the services of `watch(notify=…)`, whatever its severity."""

    times: int = between(1000, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot(Limits):
    """Write a debug snapshot, as `monitor.snapshot()` does."""

    times: int = between(3, 0)
    cooldown: int = between(100, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SkipBatch(Limits):
    """Leave out the optimizer step of a batch whose gradient norm is not finite or far above its usual level."""

    times: int = between(20, 0)
    factor: float = between(10.0, 1.0)
    """How many times its median a gradient norm must exceed to be skipped, if the norms hardly vary."""
    deviations: float = between(8.0, 0.0)
    """How many standard deviations above its median, on a log scale, if they vary more."""
    window: int = between(64, 8, 4096)
    """Number of recent norms of batches that were not skipped, from which the limit is computed."""
    least: int = between(20, 1)
    """Number of norms needed before a batch is skipped. Norms that are not finite are always skipped."""
    in_a_row: int = between(3, 1)
    """Number of batches with a finite norm that are skipped in a row. After that, it is the level that has changed. If
    more others are skipped in a row, it is not the batch, and a policy that can roll back does."""
    host_read: bool = False
    """Whether an optimizer on an accelerator that is not fused may wait for the norm on every step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LowerLr(Limits):
    """Lower the learning rate of all groups, and of their schedulers."""

    times: int = between(3, 0)
    cooldown: int = between(50, 0)
    factor: float = between(0.5, 1e-6, 1.0)
    """Factor if the alert does not advise a learning rate itself."""
    least_factor: float = between(0.1, 1e-6, 1.0)
    """Smallest factor that an alert may advise, unless it names the rate from before a jump."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveClip(Limits):
    """Change the limit that `monitor.clip_grad_norm_` clips to."""

    times: int = between(3, 0)
    cooldown: int = between(100, 0)
    factor: float = between(2.0, 1.0)
    """Factor between the old and the new limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RollBack(Limits):
    """Return to the last healthy checkpoint."""

    times: int = between(3, 0)
    cooldown: int = between(20, 0)
    every: int = between(100, 1)
    """Steps between checkpoints. None is taken while a warning is open."""
    keep: int = between(2, 1)
    """Number of checkpoints that are kept."""
    where: Literal["memory", "disk"] = "memory"
    """`memory` keeps a copy of model and optimizer state beside the original; `disk` writes it to the run directory."""
    skip_data: bool = False
    """Go on with new data, instead of returning a loader that has a `state_dict` to its position as well."""
    lr_factor: float = between(1.0, 1e-6, 1.0)
    """Factor for the learning rate after the return."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebalance(Limits):
    """Change the weight of the task that the alert names in `monitor.combine_losses`."""

    times: int = between(3, 0)
    cooldown: int = between(200, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop(Limits):
    """Set `monitor.should_stop`."""


ACTIONS = (
    "notify", "snapshot", "skip_batch", "lower_lr", "raise_clip", "lower_clip", "roll_back", "rebalance", "stop",
)  # fmt: skip

HARMLESS = frozenset({"notify", "snapshot"})
"""Actions that change nothing in the run. They are taken for any severity, in addition to others."""

_FAMILIES = {family.letter.lower(): family for family in Family} | {family.name.lower(): family for family in Family}
_SEVERITIES = {str(severity): severity for severity in sorted(Severity, reverse=True)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy(Settings):
    """What a monitor does about alerts; by default it only reports.

    `rules` maps rules (code or name), families (letter or name) or severities to an action or a list of actions. The
    most specific entry decides: rule, then family, then the highest severity that the alert reaches. In a list,
    `notify` and `snapshot` are always taken. Of the others one is taken, the first whose budget is left.
    """

    rules: Mapping[str, Any] = field(default_factory=dict, kw_only=False)
    dry_run: bool = False
    """Record what every action would have done, without doing it."""
    outcome_steps: int = between(200, 1)
    """Number of steps after an action in which its alert may be resolved and the loss may come back."""
    notify: Notify = Notify()
    snapshot: Snapshot = Snapshot()
    skip_batch: SkipBatch = SkipBatch()
    lower_lr: LowerLr = LowerLr()
    raise_clip: MoveClip = MoveClip()
    lower_clip: MoveClip = MoveClip()
    roll_back: RollBack = RollBack()
    rebalance: Rebalance = Rebalance()
    stop: Stop = Stop()

    def __post_init__(self) -> None:
        Settings.__post_init__(self)
        for key, actions in self.rules.items():
            if not isinstance(key, str):
                raise TypeError(f"a policy maps rules, families or severities to actions, but {key!r} is no name")
            for action in _listed(key, actions):
                if action not in ACTIONS:
                    hint = did_you_mean(action, ACTIONS) or f"the actions are {', '.join(ACTIONS)}"
                    raise ValueError(f"unknown action {action!r} for {key!r} in the policy; {hint}")

    @classmethod
    def of(cls, policy: Any) -> Policy:
        """A policy from anything `watch(policy=…)` accepts."""
        if isinstance(policy, Policy):
            return policy
        if isinstance(policy, str) and policy in PRESETS:
            return PRESETS[policy]
        if isinstance(policy, Mapping):
            is_table = any(setting.name in policy for setting in fields(cls))
            return cls.from_dict(policy, "policy") if is_table else cls(policy)
        names = ", ".join(map(repr, PRESETS))
        hint = f"; {words}" if isinstance(policy, str) and (words := did_you_mean(policy, list(PRESETS))) else ""
        raise ValueError(
            f"policy must be {names}, a forewarn.Policy, or a dict such as {{'loss-spike': 'snapshot'}}, "
            f"not {policy!r}{hint}"
        )

    def checked(self, own: Iterable[Rule] = ()) -> Self:
        """This policy; raises ValueError if it names something that is no rule, family or severity, or does nothing."""
        own = tuple(own)
        changed = [action for action in ACTIONS if self.limits(action) != Policy().limits(action)]
        if changed and not self.rules:
            raise ValueError(
                f"the policy sets {changed[0]}, but no rule takes it; say when, such as "
                f"{{'rules': {{'critical': {changed[0]!r}}}, {changed[0]!r}: {{…}}}}"
            )
        for key in self.rules:
            if key.strip().lower() in _FAMILIES or key.strip().lower() in _SEVERITIES:
                continue
            try:
                find_rule(key, own)
            except ValueError:
                rules = (*all_rules(), *own)
                names = [*(rule.name for rule in rules), *(rule.code for rule in rules), *_FAMILIES, *_SEVERITIES]
                hint = did_you_mean(key, names)
                raise ValueError(
                    f"the policy names {key!r}, which is no rule, family or severity; "
                    + (hint or "`forewarn rules` lists the rules")
                ) from None
        return self

    @property
    def actions(self) -> frozenset[str]:
        """Every action that it may take."""
        return frozenset(action for key, actions in self.rules.items() for action in _listed(key, actions))

    def limits(self, action: str) -> Limits:
        """The budget of an action."""
        limits: Limits = getattr(self, action)
        return limits

    def is_dry(self, action: str) -> bool:
        return self.dry_run or self.limits(action).dry_run

    def actions_for(self, alert: Alert) -> tuple[str, ...]:
        """The actions for an alert, in order; those that change a run only from a warning on."""
        entries = {key.strip().lower(): _listed(key, actions) for key, actions in self.rules.items()}
        family = BY_LETTER.get(alert.code[:1])
        keys = [alert.code.lower(), alert.name.lower()]
        keys += [] if family is None else [family.letter.lower(), family.name.lower()]
        keys += [name for name, severity in _SEVERITIES.items() if alert.severity >= severity]
        actions = next((entries[key] for key in keys if key in entries), ())
        if alert.severity < Severity.WARNING:
            return tuple(action for action in actions if action in HARMLESS)
        return actions


def _listed(key: str, actions: Any) -> tuple[str, ...]:
    if isinstance(actions, str):
        return (actions,)
    if not isinstance(actions, Sequence) or not all(isinstance(action, str) for action in actions):
        raise TypeError(f"the policy for {key!r} must be an action or a list of actions, not {actions!r}")
    return tuple(actions)


PRESETS: Mapping[str, Policy] = {
    "observe": Policy(),
    "stop": Policy({"critical": "stop"}),
    "autopilot": Policy(
        {
            "non-finite-gradient": ("skip_batch", "roll_back", "stop"),
            "non-finite-loss": ("skip_batch", "roll_back", "stop"),
            "non-finite-weight": ("roll_back", "stop"),
            "gradient-spike": "skip_batch",
            "update-ratio-high": "lower_lr",
            "update-ratio-jump": "lower_lr",
            "loss-divergence": "roll_back",
            "loss-above-start": "roll_back",
        },
        roll_back=RollBack(skip_data=True, lr_factor=0.5),
    ),
}
"""The policies that have a name."""
