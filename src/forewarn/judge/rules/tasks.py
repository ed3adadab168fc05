"""Rules about tasks that share a model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from forewarn.judge.headlines import Message
from forewarn.judge.registry import finding, rule
from forewarn.judge.remedies import advise, shift_task_weight, snapshot
from forewarn.judge.series import Floats, Panel
from forewarn.settings import Settings, between
from forewarn.types import Finding, Severity

_RAISE = shift_task_weight(True, "its gradient then counts in the shared layers")
_LOWER = shift_task_weight(False, "it then leaves room for the other task in the shared layers")
_BALANCE = advise(
    "balance_tasks",
    'Balance tasks: monitor.combine_losses(..., balance="{balance}")',
    "it keeps the gradients of the tasks at the same level from then on",
    balance="gradnorm",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _TaskRatio(Settings):
    """When the ratio of two tasks' gradients counts, and when a weak task does not."""

    window: int = between(10, 2, counts="readings")
    """Number of recent measured steps in the mean ratio, which is taken on a log scale."""
    solved: float = between(0.2, 0.0, 1.0)
    """Fraction of its first loss below which a weak task has learned its part and is not neglected."""
    ahead: float = between(0.8, 0.0, 1.0)
    """Remaining loss of the weak task relative to that of the strong one, below which it is not neglected either."""
    mending: float = between(1.1, 1.0)
    """Rise of the weak task's weight relative to the strong one's from which the tasks are being balanced already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskImbalance(_TaskRatio):
    """When `task-imbalance` fires."""

    minor: float = between(2.0, 1.0)
    """Ratio of two tasks' gradients, in either direction, above which it is information."""
    significant: float = between(3.0, 1.0)
    """Ratio above which it is a warning."""
    starved: float = between(5.0, 1.0)
    """Ratio above which `task-collapse` reports it instead."""


@rule(
    "T101", "task-imbalance", reads=("task/ratio", "task/remaining", "task/weight"), per_scope=True, hold=2, keep=100,
    settings=TaskImbalance,
    message=Message(
        "Task {dominating} pulls {ratio:×} as hard as task {starved}",
        "gradient ratio {scope} {value} · limit {bound}",
    ),
    remedies=(_RAISE, _LOWER, _BALANCE),
)  # fmt: skip
def task_imbalance(ratios: Panel, remaining: Panel, weights: Panel, settings: TaskImbalance) -> Iterator[Finding]:
    """One task pulls on the shared layers several times as hard as another.

    ## Why is this bad?
    The stronger task shapes the shared layers, and the weaker one has to work with features made for something else.
    The scope is `a/b`, and the value is the gradient norm of a divided by that of b, weighted as in the loss. A ratio
    from 0.5 to 2 is balanced, up to 3 is information, up to 5 is a warning, and above that is a collapse. Single
    batches differ, so the rule takes the mean of ten measured steps on a log scale, which treats a/b and b/a alike.

    A task whose gradient is small because it has learned its part is not neglected. So a task does not fire with less
    than a fifth of its first loss left, or clearly less than the stronger task has left. A pair whose weights are
    already moving towards balance does not fire either.

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
    """Ratio of two tasks' gradients, in either direction, above which the weaker one is starved."""


@rule(
    "T102", "task-collapse", reads=("task/ratio", "task/remaining", "task/weight"), per_scope=True, hold=2, keep=100,
    explains=("T101",),
    settings=TaskCollapse,
    message=Message(
        "Task {dominating} leaves task {starved} almost no influence",
        "gradient ratio {scope} {value} · limit {bound}",
    ),
    remedies=(_RAISE, _LOWER, _BALANCE, snapshot()),
)  # fmt: skip
def task_collapse(ratios: Panel, remaining: Panel, weights: Panel, settings: TaskCollapse) -> Iterator[Finding]:
    """One task dominates the shared layers and starves another.

    ## Why is this bad?
    At more than five times the gradient, the optimizer follows the dominating task. The starved task stays at chance
    however long the run is, because the shared features never adapt to it. The sum of the losses still falls, which
    hides the problem. The usual cause is a loss on a different scale: a sum next to a mean, or pixels next to
    probabilities. Or a weight was set for another model.

    The rule takes the mean of ten measured steps on a log scale. Batches in which one task has no gradient, such as
    those without labels, are left out as long as others have one. A task with less than a fifth of
    its first loss left has learned and is not starved. Nor is one with clearly less left than the stronger task. A pair
    whose weights are already moving towards balance does not fire either.

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
    """Number of recent measured steps in the mean."""
    cosine: float = between(-0.4, -1.0, 0.0)
    """Mean cosine below which two tasks partly undo each other's steps: information."""
    severe: float = between(-0.6, -1.0, 0.0)
    """Mean cosine below which little is left of either step: a warning."""
    negative_share: float = between(0.8, 0.0, 1.0)
    """Minimum fraction of these readings that must be negative."""


@rule(
    "T103", "gradient-conflict", reads=("task/cosine", "task/ratio"), per_scope=True, hold=2, keep=100,
    settings=GradientConflict,
    message=Message(
        "Tasks {dominating} and {other} pull in opposite directions",
        "mean gradient cosine {value} · limit {bound}",
    ),
    remedies=(
        advise("separate_layers", "Give each task a separate layer on top of the shared ones",
               "the tasks can then differ where they disagree", scope_is="tasks"),
        _LOWER,
        advise("project_gradients", "Remove the conflicting part of each gradient (PCGrad)",
               "both losses can then keep falling (Yu et al. 2020)", scope_is="tasks"),
    ),
)  # fmt: skip
def gradient_conflict(cosines: Panel, ratios: Panel, settings: GradientConflict) -> Iterator[Finding]:
    """Two tasks pull the shared layers in opposite directions.

    ## Why is this bad?
    What one task gains, the other loses. Most of every step cancels out, and both tasks end up worse than they would
    alone. A cosine near zero is normal, since most directions are unrelated, and so is a single negative batch. Near
    the end of training some conflict is natural. So this is a warning only if the tasks undo most of each other's work
    over twenty measured steps.

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
        ratio = ratios.series(cosines.scopes[index]).last
        dominating, other = _strong_and_weak(cosines.scopes[index], not ratio < 1)
        yield finding(
            Severity.WARNING if severe else Severity.INFO, means[index], settings.severe if severe else settings.cosine,
            cosines.scopes[index], negative_share=negative[index], dominating=dominating, other=other,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Apart:
    """Two tasks whose gradients differ, although the weaker one has not learned its part yet."""

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
    """The pairs whose mean ratio over a full window, on a log scale, exceeds a bound in either direction."""
    if len(ratios) < settings.window:
        return
    logs = np.array([_mean_log(column, settings.window) for column in ratios.values.T.astype(np.float64)])
    with np.errstate(over="ignore"):
        means, apart = np.exp(logs), np.exp(np.abs(logs))
    for index in np.flatnonzero(apart > bound):
        strong, weak = _strong_and_weak(ratios.scopes[index], bool(means[index] > 1))
        of_weak, of_strong = (remaining.series(task).median(settings.window) for task in (weak, strong))
        learned = of_weak < settings.solved or of_weak < settings.ahead * of_strong
        if not learned and not _risen(weights, weak, strong) > settings.mending:
            yield _Apart(ratios.scopes[index], float(means[index]), float(apart[index]), strong, weak)


def _mean_log(ratios: Floats, window: int) -> float:
    """The mean logarithm of the latest ratios; NaN while there are too few.

    A ratio of 0 or inf means that a task has no gradient in that batch. If it has one in other batches, as with sparse
    labels, only those count. A task without a gradient over the whole window counts as having none.
    """
    usable = np.isfinite(ratios) & (ratios > 0)
    if usable[-window:].any():
        return float(np.log(ratios[usable][-window:]).mean()) if usable.sum() >= window else np.nan
    recent = ratios[-window:]
    return np.inf if np.isposinf(recent).all() else -np.inf if (recent == 0).all() else np.nan


def _risen(weights: Panel, weak: str, strong: str) -> float:
    """Factor by which one task's weight has risen relative to another's over the readings in memory."""
    mine, theirs = (weights.series(task).values.astype(np.float64) for task in (weak, strong))
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
