"""Rules about several tasks that share a model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from forewarn.judge.headlines import Message
from forewarn.judge.registry import finding, rule
from forewarn.judge.remedies import advise, shift_task_weight, snapshot
from forewarn.judge.series import Floats, Panel, Series
from forewarn.settings import Settings, between
from forewarn.types import Finding, Severity

_RAISE = shift_task_weight(True, "its gradient then reaches the layers that the tasks share")
_LOWER = shift_task_weight(False, "it leaves room in the layers that the tasks share")
_BALANCE = advise(
    "balance_tasks",
    "Balance tasks",
    'monitor.combine_losses(..., balance="gradnorm") holds the gradients of the tasks level by itself, from then on',
    balance="gradnorm",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _TaskRatio(Settings):
    """When the ratio of two tasks' gradients is judged, and when the weaker task is not reported."""

    window: int = between(10, 2, counts="readings")
    """Measured steps whose mean ratio, on a log scale, is judged; so many there must be."""
    solved: float = between(0.2, 0.0, 1.0)
    """Share of its first loss below which a weak task has learned its part, and is not neglected."""
    ahead: float = between(0.8, 0.0, 1.0)
    """The same for a weak task that has less than this share left of what the strong one has left."""
    mending: float = between(1.1, 1.0)
    """Times that its weight has risen against the strong one's where the tasks are being balanced already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskImbalance(_TaskRatio):
    """When `task-imbalance` fires."""

    minor: float = between(2.0, 1.0)
    """Ratio of two tasks' gradients, either way round, above which it is information."""
    significant: float = between(3.0, 1.0)
    """The same above which it is a warning."""
    starved: float = between(5.0, 1.0)
    """The same above which it is no longer this but a collapse, which has a rule of its own."""


@rule(
    "T101", "task-imbalance", reads=("task/ratio", "task/remaining", "task/weight"), per_scope=True, hold=2, keep=100,
    settings=TaskImbalance,
    message=Message(
        "Task {dominating} outweighs task {starved}",
        "gradient of {dominating} {ratio}× that of {starved} · limit {bound}×",
    ),
    remedies=(_RAISE, _LOWER, _BALANCE),
)  # fmt: skip
def task_imbalance(ratios: Panel, remaining: Panel, weights: Panel, settings: TaskImbalance) -> Iterator[Finding]:
    """One task pulls on the shared layers several times harder than another.

    ## Why is this bad?
    What the tasks share is shaped for the stronger one, and the weaker one has to do with features that were made for
    something else. Between 0.5 and 2 is balanced; up to 3 is information, up to 5 a warning, and
    above that a collapse. The scope is `a/b`, the value the gradient norm of a over that of b, each weighted as it
    enters the loss. Single batches differ, so the mean of ten measured steps is judged, on a log scale, where a/b and
    b/a are alike.

    A task with a small gradient because it has learned its part is not neglected: one that has a fifth of its first
    loss left, or clearly less than the stronger one, is left in peace. So is a pair whose weights are moving towards
    each other already.

    ## Example
    fires: task/ratio{pointer/type} 4.0x12
    fires: task/ratio{pointer/type} 0.25x12
    quiet: task/ratio{pointer/type} 1.8x20
    quiet: task/ratio{pointer/type} 1.0x20 20.0 1.0x3
    quiet: task/ratio{pointer/type} 4.0x12 | task/remaining{pointer} 0.9x12 | task/remaining{type} 0.3x12
    """
    for pair in _apart(ratios, remaining, weights, settings, settings.minor):
        if pair.apart > settings.starved:
            continue
        significant = pair.apart > settings.significant
        bound = settings.significant if significant else settings.minor
        yield pair.finding(Severity.WARNING if significant else Severity.INFO, bound)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskCollapse(_TaskRatio):
    """When `task-collapse` fires."""

    ratio: float = between(5.0, 1.0)
    """Ratio of two tasks' gradients above which, or below one over which, the weaker one is starved."""


@rule(
    "T102", "task-collapse", reads=("task/ratio", "task/remaining", "task/weight"), per_scope=True, hold=2, keep=100,
    explains=("T101",),
    settings=TaskCollapse,
    message=Message(
        "Task {starved} is starved by task {dominating}",
        "gradient of {dominating} {ratio}× that of {starved} · limit {bound}×",
    ),
    remedies=(_RAISE, _LOWER, _BALANCE, snapshot()),
)  # fmt: skip
def task_collapse(ratios: Panel, remaining: Panel, weights: Panel, settings: TaskCollapse) -> Iterator[Finding]:
    """One task has the shared layers for itself, and another is starved.

    ## Why is this bad?
    Above five times the gradient of the other, the optimizer goes where the dominating task points, and the starved one
    stays at chance however long the run is: its head learns from features that never turn to it. The sum of the losses
    falls all the same, which hides it. The usual cause is a loss on another scale (a sum beside a mean, pixels beside
    probabilities) or a weight that was set for another model.

    The mean of ten measured steps is judged, on a log scale; a batch without a gradient of one of them, such as one
    without labels, is left out as long as others have one. A task with a small gradient and a fifth of its first loss
    left, or clearly less than the stronger one has, is not starved: it has learned. Where weights are being balanced,
    and on their way, nothing is said.

    ## Example
    fires: task/ratio{pointer/type} 40.0x12
    fires: task/ratio{pointer/type} 0.1x12
    fires: task/ratio{pointer/type} infx12
    quiet: task/ratio{pointer/type} 1.0x12 inf 1.0x12
    quiet: task/ratio{pointer/type} 4.0x20
    quiet: task/ratio{pointer/type} 40.0x12 | task/weight{pointer} 1.0x12 | task/weight{type} 1.0+0.1x12
    quiet: task/ratio{pointer/type} 40.0x12 | task/remaining{pointer} 0.05x12 | task/remaining{type} 0.1x12
    """
    for pair in _apart(ratios, remaining, weights, settings, settings.ratio):
        yield pair.finding(Severity.CRITICAL, settings.ratio)


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientConflict(Settings):
    """When `gradient-conflict` fires."""

    window: int = between(20, 2, counts="readings")
    """Measured steps that are judged together; so many there must be."""
    cosine: float = between(-0.4, -1.0, 0.0)
    """Mean cosine below which two tasks undo each other's steps in part: information."""
    severe: float = between(-0.6, -1.0, 0.0)
    """Mean cosine below which little is left of either: a warning."""
    negative_share: float = between(0.8, 0.0, 1.0)
    """Of the readings that must be negative for a conflict to be sustained."""


@rule(
    "T103", "gradient-conflict", reads=("task/cosine", "task/ratio"), per_scope=True, hold=2, keep=100,
    settings=GradientConflict,
    message=Message(
        "Tasks {dominating} and {other} pull in opposite directions",
        "mean gradient cosine {value} · limit {bound}",
    ),
    remedies=(
        advise("separate_layers", "Separate layers", "a layer of its own for each task, above what they share, lets both have their way",
               scope_is="tasks"),
        _LOWER,
        advise("project_gradients", "Project gradients", "taking out of each gradient what opposes the other keeps both losses falling "
               "(PCGrad, Yu et al. 2020)", scope_is="tasks"),
    ),
)  # fmt: skip
def gradient_conflict(cosines: Panel, ratios: Panel, settings: GradientConflict) -> Iterator[Finding]:
    """Two tasks pull what they share in opposite directions.

    ## Why is this bad?
    What one task gains the other loses: their sum is smaller than either, most of every step is spent on a tug-of-war,
    and both end worse than they would alone. A cosine around zero is usual, since most directions have nothing to do
    with each other, and a single negative batch is nothing. Near the end of training some opposition is natural, so it
    is a warning only where the mean of twenty measured steps says that the tasks undo each other for the greater part.

    ## Example
    fires: task/cosine{pointer/type} -0.6x22
    quiet: task/cosine{pointer/type} -0.1x30
    quiet: task/cosine{pointer/type} 0.1x20 -0.9 0.1x20
    """
    recent = cosines.values[-settings.window :].astype(np.float64)
    if len(recent) < settings.window:
        return
    finite = np.isfinite(recent)
    means = np.where(finite, recent, 0.0).sum(axis=0) / np.maximum(finite.sum(axis=0), 1)
    negative = (recent < 0).mean(axis=0)
    lasting = finite.all(axis=0) & (negative >= settings.negative_share)
    for index in np.flatnonzero(lasting & (means < settings.cosine)):
        severe = means[index] < settings.severe
        ratio = Series(ratios, cosines.scopes[index]).last
        dominating, other = _strong_and_weak(cosines.scopes[index], not ratio < 1)
        yield finding(
            Severity.WARNING if severe else Severity.INFO, means[index], settings.severe if severe else settings.cosine,
            cosines.scopes[index], negative_share=negative[index], dominating=dominating, other=other,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Apart:
    """Two tasks whose gradients differ, where the weaker one has not learned more than the stronger."""

    pair: str
    mean: float
    """Mean of the recorded ratio."""
    apart: float
    """Ratio of the stronger gradient to the weaker one."""
    dominating: str
    starved: str

    def finding(self, severity: Severity, bound: float) -> Finding:
        """The finding, with its bound on the same side as the ratio."""
        return finding(
            severity, self.mean, bound if self.mean > 1 else 1 / bound, self.pair,
            dominating=self.dominating, starved=self.starved, ratio=self.apart,
        )  # fmt: skip


def _apart(
    ratios: Panel, remaining: Panel, weights: Panel, settings: TaskImbalance | TaskCollapse, bound: float
) -> Iterator[_Apart]:
    """The pairs whose mean ratio over a full window, on a log scale, is beyond a bound in either direction."""
    if len(ratios) < settings.window:
        return
    logs = np.array([_mean_log(column, settings.window) for column in ratios.values.T.astype(np.float64)])
    with np.errstate(over="ignore"):
        means, apart = np.exp(logs), np.exp(np.abs(logs))
    for index in np.flatnonzero(apart > bound):
        strong, weak = _strong_and_weak(ratios.scopes[index], bool(means[index] > 1))
        of_weak, of_strong = (Series(remaining, task).median(settings.window) for task in (weak, strong))
        learned = of_weak < settings.solved or of_weak < settings.ahead * of_strong
        if not learned and not _risen(weights, weak, strong) > settings.mending:
            yield _Apart(ratios.scopes[index], float(means[index]), float(apart[index]), strong, weak)


def _mean_log(ratios: Floats, window: int) -> float:
    """The mean logarithm of the latest ratios; NaN while there are too few.

    A ratio of 0 or inf is a batch in which a task has no gradient. If other batches have one, as with sparse labels,
    only those are compared; a task without any over the whole window counts as having none.
    """
    usable = np.isfinite(ratios) & (ratios > 0)
    if usable[-window:].any():
        return float(np.log(ratios[usable][-window:]).mean()) if usable.sum() >= window else np.nan
    recent = ratios[-window:]
    return np.inf if np.isposinf(recent).all() else -np.inf if (recent == 0).all() else np.nan


def _risen(weights: Panel, weak: str, strong: str) -> float:
    """Factor by which one task's weight has risen relative to another's over the readings in memory."""
    mine, theirs = (Series(weights, task).values.astype(np.float64) for task in (weak, strong))
    if not len(mine) or not len(theirs):
        return 1.0
    with np.errstate(all="ignore"):
        return float((mine[-1] / theirs[-1]) / (mine[0] / theirs[0]))


def _strong_and_weak(pair: str, first_is_strong: bool) -> tuple[str, str]:
    first, _, second = pair.partition("/")
    return (first, second) if first_is_strong else (second, first)


@dataclass(frozen=True, kw_only=True)
class TaskThresholds(Settings):
    """The settings of the rules in this file, by the name of the rule."""

    task_imbalance: TaskImbalance = TaskImbalance()
    task_collapse: TaskCollapse = TaskCollapse()
    gradient_conflict: GradientConflict = GradientConflict()
