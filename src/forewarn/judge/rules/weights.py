"""Rules about the weights."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from forewarn.judge.headlines import Message
from forewarn.judge.registry import finding, rule
from forewarn.judge.remedies import (
    advise,
    clip_gradient,
    lower_lr,
    lower_weight_decay,
    roll_back,
    snapshot,
    stop,
)
from forewarn.judge.series import Panel, median
from forewarn.judge.tensor_kinds import kinds, matrices
from forewarn.settings import Settings, between
from forewarn.types import Finding, RunInfo, Severity


@rule(
    "W101", "non-finite-weight", reads=("weight/nonfinite",), per_scope=True, keep=100,
    explains=("L101", "G101", "W104", "A103", "M101"),
    message=Message(
        "{scope} contains NaN or infinity",
        "non-finite values {value} · tensors affected {num_tensors}",
    ),
    remedies=(
        roll_back("no later step repairs a weight that is not a number, nor the optimizer's moments of it"),
        stop(),
        lower_lr(0.5, "after the return: the same steps lead to the same place"),
        snapshot(),
    ),
)  # fmt: skip
def non_finite_weight(nonfinite: Panel) -> Iterator[Finding]:
    """Weights that hold NaN or infinite values.

    ## Why is this bad?
    Every output that depends on them is not finite either, and so is every gradient: within a step or two the whole
    model is lost, and so is each checkpoint written from here on. The cause is a step with gradients that were not
    finite, an overflow in half precision, or a checkpoint that was damaged before.

    ## Example
    fires: weight/nonfinite{layer.weight} 0x5 3
    quiet: weight/nonfinite{layer.weight} 0x6
    """
    bad = np.flatnonzero(nonfinite.last > 0)
    for index in bad:
        yield finding(Severity.CRITICAL, nonfinite.last[index], 0.0, nonfinite.scopes[index], num_tensors=len(bad))


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightNormSpike(Settings):
    """When `weight-norm-spike` fires."""

    factor: float = between(10.0, 1.0)
    """Times the median of the earlier checks."""
    minimum: int = between(8, 2, counts="readings")
    """Earlier checks that must have been seen before anything is judged."""
    growth: float = between(2.0, 1.0)
    """Times its oldest kept norm up to which that median is a level; above, the tensor is growing into place."""


@rule(
    "W102", "weight-norm-spike", reads=("weight/norm",), per_scope=True, keep=100,
    explains=(
        "L101", "L102", "L103", "G102", "G104", "G106", "G110", "G111", "W103", "A102", "A103", "A106", "A107", "A108",
        "M102", "M103",
    ),
    settings=WeightNormSpike,
    message=Message(
        "The norm of {scope} is {ratio}× its earlier level",
        "weight norm {value} · limit {bound} · usual {level}",
    ),
    remedies=(
        lower_lr(0.3),
        roll_back(),
        clip_gradient(),
        advise("inspect_layer", "Inspect layer", "whatever multiplies this weight has lost its scale", scope_is="parameter"),
    ),
)  # fmt: skip
def weight_norm_spike(norm: Panel, settings: WeightNormSpike, info: RunInfo) -> Iterator[Finding]:
    """Weight norm many times what it was at the earlier checks.

    ## Why is this bad?
    Weights grow slowly in a healthy run. A tensor whose norm has gone up tenfold was thrown away from what it had
    learned, and its outputs overflow soon. A tensor that starts at zero grows by large factors too, but it has no level
    yet, and is left alone until its growth has slowed down.

    ## Example
    fires: weight/norm{layer.weight} 5.0+0.01x20 80.0
    quiet: weight/norm{layer.weight} 5.0+0.01x20 20.0
    quiet: weight/norm{layer.weight} 0.0+0.01x10 1.0 2.0 3.0
    """
    earlier, last = norm.values[:-1], norm.last
    if len(earlier) < settings.minimum:
        return
    # `last > factor · median` is the same as: at least half of the earlier ones lie below `last / factor`
    least = last / np.float32(settings.factor)
    likely = list(matrices(np.fmin.reduce(earlier) < least, norm.scopes, info))
    below = np.count_nonzero(earlier[:, likely] < least[likely], axis=0) if likely else np.empty(0, np.intp)
    for index in itertools.compress(likely, 2 * below >= len(earlier)):
        column = earlier[np.isfinite(earlier[:, index]), index]
        if len(column) < settings.minimum:
            continue
        level = float(np.median(column))
        if 0 < level <= settings.growth * column[0] and last[index] > settings.factor * level:
            ratio = float(last[index]) / level
            bound = settings.factor * level
            yield finding(Severity.WARNING, last[index], bound, norm.scopes[index], level=level, ratio=ratio)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightNormsApart(Settings):
    """When `weight-norms-apart` fires."""

    factor: float = between(1000.0, 1.0)
    """Largest over smallest root-mean-square weight among layers of the same kind."""
    tensors: int = between(3, 2)
    """Tensors of one kind that there must be to compare."""
    minimum: int = between(8, 2, counts="readings")
    """Checks that must have been seen before anything is judged."""
    growth: float = between(1.5, 1.0)
    """Times its oldest kept norm from which a small tensor counts as still growing into place."""


@rule(
    "W103", "weight-norms-apart", reads=("weight/norm",), per_scope=True, hold=3, keep=200, explains=("G105", "G106"),
    settings=WeightNormsApart,
    message=Message(
        "{scope} is on a different scale from its peers",
        "root mean square {root_mean_square} · peers {usual} · {value}× apart · limit {bound}×",
    ),
    remedies=(
        advise("inspect_layer", "Inspect layer", "check how it is initialised, whether it is normalised, and what multiplies it",
               scope_is="parameter"),
        lower_lr(0.5, "a layer that outgrows its peers moves too far at each step"),
        lower_weight_decay(0.1, "a layer that shrinks away from its peers is decayed faster than it learns"),
    ),
)  # fmt: skip
def weight_norms_apart(norm: Panel, settings: WeightNormsApart, info: RunInfo) -> Iterator[Finding]:
    """Weights of one layer on a wholly different scale than those of the other layers of its kind.

    ## Why is this bad?
    One learning rate cannot fit weights that differ a thousandfold: the large ones barely move, or the small ones are
    rewritten at each step. It shows a layer that was initialised on another scale, that collapsed, or that grows
    without bound. Compared is the root mean square of the elements, so the size of a layer does not matter; layers
    that start at zero are left alone while they grow.

    ## Example
    fires: weight/norm{a.weight} 5.0x12 | weight/norm{b.weight} 6.0x12 | weight/norm{c.weight} 0.001x12
    quiet: weight/norm{a.weight} 5.0x12 | weight/norm{b.weight} 6.0x12 | weight/norm{c.weight} 0.0+0.0001x12
    quiet: weight/norm{a.weight} 5.0x12 | weight/norm{b.weight} 6.0x12 | weight/norm{c.weight} 0.1x12
    """
    if len(norm) < settings.minimum:
        return
    groups = kinds(norm.scopes, info, settings.tensors)
    size = norm.last / groups.root_counts
    growing = norm.last > settings.growth * norm.values[0].astype(np.float64)
    for members in groups.members:
        positive = members[np.isfinite(size[members]) & (size[members] > 0)]
        settled = positive[~growing[positive]]
        if len(positive) < settings.tensors or not len(settled):
            continue
        smallest, largest = settled[np.argmin(size[settled])], positive[np.argmax(size[positive])]
        apart = float(size[largest] / size[smallest])
        if apart <= settings.factor:
            continue
        usual = median(size[positive])
        outlier, peer = (largest, smallest) if size[largest] / usual > usual / size[smallest] else (smallest, largest)
        yield finding(
            Severity.WARNING, apart, settings.factor, norm.scopes[outlier],
            root_mean_square=float(size[outlier]), usual=usual, compared_with=norm.scopes[peer],
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightShrinking(Settings):
    """When `weight-shrinking` fires."""

    share: float = between(0.1, 0.0, 1.0)
    """Share of the norm it had in the oldest kept check below which a tensor counts as shrinking away."""
    minimum: int = between(8, 2, counts="readings")
    """Checks that must have been seen before anything is judged."""


@rule(
    "W104", "weight-shrinking", reads=("weight/norm", "weight/nonfinite"), per_scope=True, hold=3, keep=200,
    explains=("G103", "G105", "G106", "U102", "W103", "A104"),
    settings=WeightShrinking,
    message=Message(
        "{scope} is shrinking away",
        "weight norm {value} · limit {bound} · {began_at} {lasting_steps} steps ago",
    ),
    remedies=(
        lower_weight_decay(0.1),
        advise("exempt_from_decay", "Exempt from decay", "a tensor that gets little gradient is decayed to nothing", scope_is="parameter"),
        advise("inspect_layer", "Inspect layer", "a layer that nothing depends on is decayed to nothing", scope_is="parameter"),
    ),
)  # fmt: skip
def weight_shrinking(norm: Panel, nonfinite: Panel, settings: WeightShrinking, info: RunInfo) -> Iterator[Finding]:
    """Weight norm that has fallen to a small share of what it was.

    ## Why is this bad?
    Weight decay takes a share of every weight at every step, and only the gradient gives it back. A layer whose norm
    falls tenfold gets too little of it: it fades out of the model, and what it passes on with it.

    ## Example
    fires: weight/norm{layer.weight} 5.0-0.4x12 0.3x3
    quiet: weight/norm{layer.weight} 5.0-0.1x15
    """
    if len(norm) < settings.minimum:
        return
    bound = settings.share * norm.values[0]
    shrunk = (norm.last < bound) & (norm.values[0] > 0)
    if not shrunk.any():
        return
    lost = {scope for scope, count in zip(nonfinite.scopes, nonfinite.last, strict=True) if count > 0}
    for index in matrices(shrunk, norm.scopes, info):
        if norm.scopes[index] not in lost:
            yield finding(
                Severity.WARNING, norm.last[index], bound[index], norm.scopes[index],
                began_at=float(norm.values[0, index]), lasting_steps=norm.at - int(norm.steps[0]) + 1,
            )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class WeightThresholds(Settings):
    """The settings of the rules in this file, by the name of the rule."""

    weight_norm_spike: WeightNormSpike = WeightNormSpike()
    weight_norms_apart: WeightNormsApart = WeightNormsApart()
    weight_shrinking: WeightShrinking = WeightShrinking()
