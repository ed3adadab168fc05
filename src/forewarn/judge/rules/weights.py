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
    exempt_from_decay,
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
        "NaN or infinity in {scope}",
        "non-finite values {value} · tensors affected {num_tensors}",
    ),
    remedies=(
        roll_back("no later step can repair these weights or their optimizer state"),
        stop(),
        lower_lr(0.5, "after a restore, the same steps would fail again"),
        snapshot(),
    ),
)  # fmt: skip
def non_finite_weight(nonfinite: Panel) -> Iterator[Finding]:
    """Weights contain NaN or infinite values.

    ## Why is this bad?
    Every output and gradient that depends on them becomes NaN or infinite too. Within a step or two the whole model is
    lost, and so is every checkpoint saved from then on. The cause is a step with non-finite gradients, an overflow in
    half precision, or a damaged checkpoint.

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
    """Times the median of the earlier norms."""
    minimum: int = between(8, 2, counts="readings")
    """Minimum number of earlier measured steps before the rule can fire."""
    growth: float = between(2.0, 1.0)
    """Largest ratio of that median to the oldest norm in memory; above it, the tensor is still growing into place."""


@rule(
    "W102", "weight-norm-spike", reads=("weight/norm",), per_scope=True, keep=100,
    explains=(
        "L101", "L102", "L103", "G102", "G104", "G106", "G110", "G111", "W103", "A102", "A103", "A106", "A107", "A108",
        "M102", "M103",
    ),
    settings=WeightNormSpike,
    message=Message(
        "Norm of {scope} is {ratio}× its usual level",
        "weight norm {value} · limit {bound} · usual {level}",
    ),
    remedies=(
        lower_lr(0.3),
        roll_back(),
        clip_gradient(),
        advise("inspect_layer", "Check the inputs and gradients of {scope}",
               "something pushed this weight far from its usual size", scope_is="parameter"),
    ),
)  # fmt: skip
def weight_norm_spike(norm: Panel, settings: WeightNormSpike, info: RunInfo) -> Iterator[Finding]:
    """A weight norm is many times its earlier level.

    ## Why is this bad?
    Weights grow slowly in a healthy run. A tensor whose norm rises tenfold has lost what it had learned, and its
    outputs may soon overflow. A tensor that starts at zero grows by large factors too, so it does not fire until its
    growth has slowed down.

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
    """Largest allowed ratio between the root-mean-square weights of layers of the same kind."""
    tensors: int = between(3, 2)
    """Minimum number of tensors of the same kind to compare."""
    minimum: int = between(8, 2, counts="readings")
    """Minimum number of measured steps before the rule can fire."""
    growth: float = between(1.5, 1.0)
    """Times its oldest norm in memory from which a small tensor counts as still growing into place."""


@rule(
    "W103", "weight-norms-apart", reads=("weight/norm",), per_scope=True, hold=3, keep=200, explains=("G105", "G106"),
    settings=WeightNormsApart,
    message=Message(
        "Scale of {scope} differs from similar layers",
        "root mean square {root_mean_square} · usual {usual} · largest ratio {value} · limit {bound}",
    ),
    remedies=(
        advise("inspect_layer", "Check the initialization and normalization of {scope}",
               "layers of the same kind should have weights of similar size", scope_is="parameter"),
        lower_lr(0.5, "a layer that outgrows the others moves too far at each step"),
        lower_weight_decay(0.1, "a layer that shrinks decays faster than it learns"),
    ),
)  # fmt: skip
def weight_norms_apart(norm: Panel, settings: WeightNormsApart, info: RunInfo) -> Iterator[Finding]:
    """The weights of one layer are on a very different scale from those of similar layers.

    ## Why is this bad?
    One learning rate cannot fit weights that differ a thousandfold: either the large ones barely move, or each step
    rewrites the small ones. The layer was initialized on another scale, has collapsed, or grows without limit. The
    rule compares the root mean square of the elements, so the size of a layer does not matter. Layers that start at
    zero do not fire while they grow.

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
    """Fraction of its oldest norm in memory below which a tensor counts as shrinking away."""
    minimum: int = between(8, 2, counts="readings")
    """Minimum number of measured steps before the rule can fire."""


@rule(
    "W104", "weight-shrinking", reads=("weight/norm", "weight/nonfinite"), per_scope=True, hold=3, keep=200,
    explains=("G103", "G105", "G106", "U102", "W103", "A104"),
    settings=WeightShrinking,
    message=Message(
        "Norm of {scope} is shrinking to zero",
        "weight norm {value} · expected at least {bound} · earlier {began_at} ({lasting_steps} steps ago)",
    ),
    remedies=(
        lower_weight_decay(0.1),
        exempt_from_decay(),
        advise("inspect_layer", "Check that the loss depends on {scope}",
               "without a gradient, only the decay acts on it", scope_is="parameter"),
    ),
)  # fmt: skip
def weight_shrinking(norm: Panel, nonfinite: Panel, settings: WeightShrinking, info: RunInfo) -> Iterator[Finding]:
    """A weight norm has fallen to a small fraction of its earlier value.

    ## Why is this bad?
    Weight decay shrinks every weight at every step, and only the gradient restores it. A layer whose norm falls
    tenfold gets too little gradient. It fades out of the model, and so does the signal that it passes on.

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
