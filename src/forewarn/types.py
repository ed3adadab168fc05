"""The shared data types: readings, findings, alerts, remedies and actions."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forewarn.codec import Noun

Values = NDArray[np.float32]
Counts = NDArray[np.int64]

_METRIC_NAME = re.compile(r"[a-z][a-z0-9_]*(/[A-Za-z0-9_.\-]+)+")


def is_metric_name(name: str) -> bool:
    """Whether `name` has the form `family/quantity` in snake_case."""
    return _METRIC_NAME.fullmatch(name) is not None


def spelled_out(name: str, scope: str) -> str:
    """A metric and one of its scopes as `family/scope/quantity`; just the name if there is no scope."""
    family, _, quantity = name.partition("/")
    return f"{family}/{scope}/{quantity}" if scope else name


class Severity(IntEnum):
    """How urgent a finding is; ordered, so that the worst is the maximum."""

    INFO = 1
    WARNING = 2
    CRITICAL = 3

    def __str__(self) -> str:
        return self.name.lower()


class AlertState(IntEnum):
    """The state of an alert in its life cycle."""

    PENDING = 0
    FIRING = 1
    RESOLVED = 2

    def __str__(self) -> str:
        return self.name.lower()


class FrozenCause(IntEnum):
    """Why a weight does not move. `update/frozen_cause` records the value.

    Pass the `value` of a member to numpy: numpy inspects members with Python code and swallows a Ctrl-C there.
    """

    MOVING = 0
    ON_PURPOSE = 1
    NOT_IN_OPTIMIZER = 2
    REQUIRES_GRAD_OFF = 3
    NO_GRADIENT = 4
    ZERO_GRADIENT = 5
    ZERO_LR = 6
    OPTIMIZER_NOT_STEPPED = 7
    STEP_SKIPPED = 8
    ROUNDED_AWAY = 9

    def __str__(self) -> str:
        return _CAUSE_IN_WORDS[self]


_CAUSE_IN_WORDS = {
    FrozenCause.MOVING: "it moves",
    FrozenCause.ON_PURPOSE: "frozen before the run",
    FrozenCause.NOT_IN_OPTIMIZER: "in no optimizer group",
    FrozenCause.REQUIRES_GRAD_OFF: "requires_grad was turned off",
    FrozenCause.NO_GRADIENT: "its gradient is None (detached)",
    FrozenCause.ZERO_GRADIENT: "its gradient is exactly zero, as behind dead units or a mask",
    FrozenCause.ZERO_LR: "the learning rate of its group is 0",
    FrozenCause.OPTIMIZER_NOT_STEPPED: "the optimizer did not step",
    FrozenCause.STEP_SKIPPED: "the gradient scaler or the policy skipped the step",
    FrozenCause.ROUNDED_AWAY: "low precision rounds its updates away",
}


class Shape(IntEnum):
    """How the values of a tensor are distributed. `gradient/shape` and `weight/shape` record the value."""

    HEALTHY = 0
    SHIFTED = 1
    HEAVY_TAILS = 2
    COLLAPSED = 3
    MULTI_MODAL = 4
    CONSTANT = 5

    def __str__(self) -> str:
        return _SHAPE_IN_WORDS[self]


_SHAPE_IN_WORDS = {
    Shape.HEALTHY: "healthy: one peak around zero",
    Shape.SHIFTED: "shifted: most values lie on one side of zero",
    Shape.HEAVY_TAILS: "heavy tails: a few values are far larger than the rest",
    Shape.COLLAPSED: "collapsed: all values are nearly equal",
    Shape.MULTI_MODAL: "multi-modal: the values form separate peaks",
    Shape.CONSTANT: "constant: all values are equal, as in a new bias or norm",
}


class BatchNormState(IntEnum):
    """What a batch norm does with its running statistics. `activation/batchnorm_state` records the value."""

    FOLLOWS = 0
    IN_EVALUATION = 1
    STANDS_STILL = 2
    ON_PURPOSE = 3

    def __str__(self) -> str:
        return _BATCH_NORM_IN_WORDS[self]


_BATCH_NORM_IN_WORDS = {
    BatchNormState.FOLLOWS: "updating with the data",
    BatchNormState.IN_EVALUATION: "in evaluation mode",
    BatchNormState.STANDS_STILL: "in training mode, but the running statistics do not change",
    BatchNormState.ON_PURPOSE: "frozen before the run",
}


class Reason(IntEnum):
    """Why a reading is unavailable. `monitor/unavailable` records the value, scoped by the metric's name."""

    AVAILABLE = 0
    SCALED_GRADIENTS = 1
    STEP_SKIPPED = 2
    NO_BACKWARD_SEEN = 3
    UNSUPPORTED_TENSOR = 4
    COMPILED = 5
    NO_FORWARD_SEEN = 6
    UNEVEN_SCALE = 7
    EVALUATION_MODE = 8
    PROVIDER_FAILED = 9
    HOOKS_REFUSED = 10
    AFTER_CLIPPING = 11
    SUM_OVER_RANKS = 12
    STATIC_GRAPH = 20
    SHARDED_PARAMETERS = 21
    REENTRANT_CHECKPOINT = 22
    NO_SHARED_LAYER = 23
    NEEDS_MESSAGES = 24
    ONE_BATCH = 30
    RANK_GRADIENT_UNSEEN = 31
    NOT_ON_EVERY_RANK = 40

    def __str__(self) -> str:
        return _REASON_IN_WORDS[self]


_REASON_IN_WORDS = {
    Reason.AVAILABLE: "available",
    Reason.SCALED_GRADIENTS: "the gradients are scaled; pass the GradScaler as watch(scaler=...)",
    Reason.STEP_SKIPPED: "the optimizer step was skipped",
    Reason.NO_BACKWARD_SEEN: "no backward pass through the watched model was seen",
    Reason.AFTER_CLIPPING: "its backward pass was not seen, so it is read at the optimizer step, after any clipping",
    Reason.SUM_OVER_RANKS: "some gradients are sums over ranks, not formed yet; monitor.clip_grad_norm_ gives the norm",
    Reason.UNSUPPORTED_TENSOR: "this kind of tensor is not supported",
    Reason.COMPILED: "it is hidden inside compiled code",
    Reason.NO_FORWARD_SEEN: "no forward pass of the watched model was seen; watch the module you call",
    Reason.UNEVEN_SCALE: "the loss scale is not a power of two, so the histogram cannot be unscaled exactly",
    Reason.STATIC_GRAPH: "an extra backward pass would break the gradient reduction of DDP with static_graph=True",
    Reason.SHARDED_PARAMETERS: "an extra backward pass would gather the sharded parameters out of turn",
    Reason.NEEDS_MESSAGES: "an extra backward pass would have to send messages between the ranks",
    Reason.REENTRANT_CHECKPOINT: "re-entrant checkpointing allows only backward(); use checkpoint(use_reentrant=False)",
    Reason.NO_SHARED_LAYER: "the tasks share no trainable layer",
    Reason.ONE_BATCH: "it needs at least two batches per step",
    Reason.RANK_GRADIENT_UNSEEN: "the gradient of a single rank cannot be seen before the average over all ranks",
    Reason.NOT_ON_EVERY_RANK: "another rank holds a part of it and did not measure it; its log says why",
    Reason.EVALUATION_MODE: "the model is in evaluation mode; call model.train() before training steps",
    Reason.PROVIDER_FAILED: "the probe it builds on failed",
    Reason.HOOKS_REFUSED: "a module of the model refuses hooks; the log names it",
}


@dataclass(frozen=True, slots=True)
class Block:
    """One metric at one step for all its scopes, so that the hot path creates no object per value."""

    step: int
    time: float
    """Seconds since the epoch."""
    name: str
    scopes: tuple[str, ...]
    """What each value belongs to; `("",)` for a metric of the whole run."""
    values: Values


@dataclass(frozen=True, slots=True)
class Distribution:
    """The histograms of one metric at one step for all its scopes, such as `gradient/histogram` of every parameter.

    The store and views receive them; rules read only the percentiles and shapes derived from them.
    """

    step: int
    time: float
    """Seconds since the epoch."""
    name: str
    scopes: tuple[str, ...]
    counts: Counts
    """[n × 2 × 64]: number of negative and positive values by the power of two of their magnitude."""
    zeros: Counts
    """[n]: number of values that are exactly zero."""


@dataclass(frozen=True, slots=True)
class ParameterInfo(Noun):
    """The fixed properties of one parameter tensor."""

    shape: tuple[int, ...]
    kind: str
    """The class of its module and its name, such as `Linear.weight`. Tensors of the same kind are comparable."""
    dtype: str
    group: int | None
    """Its optimizer group at attach time, counted over all optimizers."""
    trainable: bool
    """False if it was frozen on purpose at attach time."""
    copied: bool = False
    """Whether it had the values of a trained parameter at attach time but was not trained, as in a target network."""


@dataclass(frozen=True, slots=True)
class RuleInfo(Noun):
    """A rule that judged a run."""

    code: str
    name: str


def peak_lr(group: Mapping[str, Any]) -> float:
    """The peak learning rate of an optimizer group, as noted by its scheduler; without one, the current rate.

    NaN if the group has no learning rate.
    """
    noted = [float(group[name]) for name in ("initial_lr", "max_lr") if name in group]
    return max(noted) if noted else float(group.get("lr", math.nan))


def improvement(before: float, after: float) -> float:
    """`(before − after) / before`: the relative decrease of a loss; NaN where it is undefined."""
    return (before - after) / abs(before) if before and math.isfinite(before) and math.isfinite(after) else math.nan


def gap(train: float, validation: float) -> float:
    """`(validation − train) / train`: how far the validation loss lies above the training loss."""
    return -improvement(train, validation)


@dataclass(frozen=True, slots=True)
class RunInfo(Noun):
    """The fixed properties of a run. Rules and remedies see this, never a model or an optimizer."""

    model: str = ""
    num_parameters: int = 0
    parameters: Mapping[str, ParameterInfo] = field(default_factory=dict)
    """By scope, in the order of the model."""
    modules: Mapping[str, str] = field(default_factory=dict)
    """Class of each module whose name is only a number, as in a `Sequential`, by name."""
    blocks: tuple[str, ...] = ()
    """Names of the repeated blocks, first to last; empty if the model has none."""
    optimizers: tuple[str, ...] = ()
    groups: tuple[Mapping[str, float], ...] = ()
    """The numeric settings of every optimizer group at attach time, such as lr and weight_decay."""
    hyperparameters: Mapping[str, Any] = field(default_factory=dict)
    """Values the user declared, such as dropout or the number of steps."""
    objective: str = "auto"
    """What the run improves: its `loss`, its `return`, or `auto` if the readings must tell."""
    every: int = 1
    """Steps between detailed measurements after the dense start; 0 if a function of the user chooses them."""
    budget: float = 0.0
    """The share of the time that detailed measurements may take, by `watch(budget=…)`; 0 if they may take any."""
    dead_unit_window: int = 10
    """Number of consecutive measured steps at zero after which a unit counts as dead."""
    saturation_level: float = 0.99
    """Fraction of its range beyond which the output of a bounded layer counts as saturated."""
    metrics: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """The user's own metrics by series name, each with its healthy range; infinite if none was declared.
    A series with an aggregation suffix belongs to the name without it."""
    device: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    started: float = 0.0
    rules: tuple[RuleInfo, ...] = ()
    """Rules that judged the run live; empty in runs of earlier versions."""
    probe_metrics: tuple[Mapping[str, Any], ...] = ()
    """The metrics that the user's own probes declared, as plain values."""
    imported_from: str = ""
    """The tool whose log the run was read from; empty if forewarn watched it."""
    first_step: int = 0
    """The step with which the run begins; 0 in a run that was watched. The first reading of a log may be later."""
    step_is_epoch: bool = False
    """Whether a step of an imported run is a whole epoch, because its log counts nothing smaller."""

    @property
    def depth(self) -> int:
        return len(self.blocks)

    @property
    def start_is_averaged(self) -> bool:
        """Whether the first loss may be a mean over several steps, or come after some, so that it hides their fall."""
        return self.first_step > 1 or self.step_is_epoch


@dataclass(frozen=True, slots=True)
class Finding(Noun):
    """What a rule found at one step, in numbers."""

    code: str
    scope: str
    step: int
    severity: Severity
    value: float
    bound: float
    evidence: Mapping[str, float | str] = field(default_factory=dict)
    """Additional numbers, or the words of an enum; never prose."""


@dataclass(frozen=True, slots=True)
class Remedy(Noun):
    """One recommended action, with its numbers filled in."""

    action: str
    parameters: Mapping[str, float | str]
    why: str
    safety: str = "notify"
    """`notify` (always allowed), `safe` (snapshot, skip a batch) or `opt_in` (lower lr, roll back, stop)."""
    do: str = ""
    """The same as a sentence without a period: `Lower the learning rate from 3e-4 to 1.5e-4`."""

    def __str__(self) -> str:
        """The action and its numbers on one line: `lower_lr 3e-4 → 1.5e-4`."""
        rest = dict(self.parameters)
        words = [self.action]
        if "from" in rest and "to" in rest:
            words.append(f"{in_words(rest.pop('from'))} → {in_words(rest.pop('to'))}")
        words += [f"{name} {in_words(value)}" for name, value in rest.items()]
        return " ".join(words)


@dataclass(frozen=True, slots=True)
class Alert(Noun):
    """A finding tracked over time. Its identity is (code, scope), never a value or a step."""

    code: str
    name: str
    scope: str
    severity: Severity
    """The worst severity of this episode."""
    state: AlertState
    since: int
    """The step at which it was first seen."""
    fired: int | None
    """The step at which it had lasted long enough to fire."""
    last: int
    """The step at which it was last seen."""
    finding: Finding
    """The latest finding of the worst severity."""
    remedies: tuple[Remedy, ...] = ()
    announced: Finding | None = None
    """The finding that made it fire or get worse, or that of the newest epoch; the words and remedies describe it."""
    headline: str = ""
    """What happened, in words."""
    numbers: str = ""
    """The quantities behind it, each with its name: `loss 9.1 · limit 3.2 · usual 2.1`."""
    cause: str = ""
    """Why it happened, if its evidence shows that."""
    place: str = ""
    """Its scope in words: `layer 2 (Linear) weight`; empty for the whole run."""
    follows: str = ""
    """The code of the alert that caused it, if that was known when it was announced."""

    @property
    def identity(self) -> tuple[str, str]:
        return (self.code, self.scope)

    def __repr__(self) -> str:
        from forewarn.views.notebook import alert_words

        return alert_words(self)

    def _repr_html_(self) -> str:
        from forewarn.views.notebook import alert_html

        return alert_html(self)


@dataclass(frozen=True, slots=True)
class Action(Noun):
    """Something done to the run because a policy allowed it, why, and what came of it."""

    step: int
    code: str
    scope: str
    action: str
    parameters: Mapping[str, float | str] = field(default_factory=dict)
    reason: str = ""
    """What had happened, in words: the headline of the alert."""
    dry_run: bool = False
    """Whether it was only recorded, and not done."""
    failed: str = ""
    """Why it could not be done; empty if it was."""
    watched_steps: int = 0
    """Number of steps after which its outcome was recorded; 0 until then."""
    resolved_after: int | None = None
    """Number of steps after which its alert was resolved; None if it was not."""
    recovered_after: int | None = None
    """Number of steps after which the loss was back at its level from before the alert; None if it was not."""

    @property
    def identity(self) -> tuple[int, str, str, str]:
        """What stays the same when its outcome is added."""
        return (self.step, self.code, self.scope, self.action)


@dataclass(frozen=True, slots=True)
class RunStart:
    """What a view is told when a run begins."""

    path: Path
    info: RunInfo
    num_rules: int
    instead_of: Path | None = None
    """The requested path, if it already holds a run."""


@dataclass(frozen=True, slots=True)
class RunEnd:
    """What a view is told when a run ends."""

    path: Path
    verdict: str
    exit_code: int
    """0 healthy, 1 warnings, 2 critical."""
    num_steps: int
    num_rules: int
    alerts: tuple[Alert, ...]
    """All alerts that have fired, most important first."""
    first_loss: float
    last_loss: float


@dataclass(frozen=True, slots=True)
class Outcome(Noun):
    """The result of one `monitor.step`: alerts whose state or severity changed, and actions taken."""

    alerts: tuple[Alert, ...] = ()
    actions: tuple[Action, ...] = ()


def figure(value: float, digits: int = 3) -> str:
    """A number with three significant digits, or all of a count: `0.0465`, `1230`, `1.23e-7`."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    if value == int(value) and abs(value) < 1e6:
        return str(int(value))
    rounded = float(f"{value:.{digits}g}")
    if 1e3 <= abs(rounded) < 1e6:
        return f"{rounded:.{max(digits - 4, 0)}f}"
    return f"{rounded:.{digits}g}".replace("e-0", "e-").replace("e+0", "e+")


def figures(*values: float) -> list[str]:
    """Several numbers to compare, with enough digits to tell different ones apart, at most six."""
    for digits in range(3, 7):
        words = [figure(value, digits) for value in values]
        if len(set(words)) == len(set(values)):
            break
    return words


def in_words(value: float | str | None) -> str:
    """A setting or a number as people read it."""
    if value is None:
        return "unset"
    return value if isinstance(value, str) else figure(value)


def counted(alerts: Sequence[Alert]) -> str:
    """The number of alerts per severity, worst first: `2 critical, 3 warnings`; empty if there are none."""
    return num_words({level: sum(alert.severity is level for alert in alerts) for level in Severity})


def num_words(counts: Mapping[Severity, int]) -> str:
    """The number of each severity in words, worst first: `1 critical, 2 warnings, 3 notes`."""
    words = {Severity.INFO: "note", Severity.WARNING: "warning"}
    return ", ".join(
        f"{counts[level]} " + (words[level] + "s" * (counts[level] != 1) if level in words else str(level))
        for level in sorted(counts, reverse=True)
        if counts[level]
    )
