"""Rules about the weights."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from forewarn.judge.headlines import Message
from forewarn.judge.optimizers import decays_apart, settings_of, steps_grow_with_gradients
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
from forewarn.judge.rules.loss import is_solved
from forewarn.judge.series import Panel, median, usual_levels
from forewarn.judge.tensor_kinds import idle_copies, is_matrix, kinds, matrices
from forewarn.settings import Settings, between
from forewarn.types import Finding, FrozenCause, RunInfo, Severity


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
    """Times its usual level, the median over the earlier steps."""
    minimum: int = between(8, 2, counts="readings")
    """Minimum number of earlier measured steps before the rule can fire."""
    growth: float = between(2.0, 1.0)
    """Largest ratio of that median to the oldest norm in memory; above it, the tensor is still growing into place."""


@rule(
    "W102", "weight-norm-spike", reads=("weight/norm", "update/frozen_cause"), when=("weight/norm",), per_scope=True,
    keep=100,
    explains=(
        "L101", "L102", "L103", "L107", "L108", "E107", "G102", "G104", "G106", "G110", "G111", "W103", "A102", "A103",
        "A106", "A107", "A108", "M102", "M103",
    ),
    settings=WeightNormSpike,
    message=Message(
        "Norm of {scope} is {ratio:×} its usual level",
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
def weight_norm_spike(norm: Panel, causes: Panel, settings: WeightNormSpike, info: RunInfo) -> Iterator[Finding]:
    """A weight norm is many times its earlier level.

    ## Why is this bad?
    Weights grow slowly in a healthy run. A tensor whose norm rises tenfold has lost what it had learned, and its
    outputs may soon overflow. A tensor that starts at zero grows by large factors too, so it does not fire until its
    growth has slowed down. Nor does growth over a time without readings that is longer than the history: a head that
    starts small may grow tenfold within a hundred steps. Nor does a weight that no optimizer moves.

    ## Example
    fires: weight/norm{layer.weight} 5.0+0.01x20 80.0
    quiet: weight/norm{layer.weight} 5.0+0.01x20 20.0
    quiet: weight/norm{layer.weight} 0.0+0.01x10 1.0 2.0 3.0
    """
    earlier, last = norm.values[:-1], norm.last
    steps = norm.steps[:-1]
    if len(earlier) < settings.minimum or steps[-1] - steps[0] < norm.longest_gap(1):
        return
    least = last / np.float32(settings.factor)
    for index in matrices(np.fmin.reduce(earlier) < least, norm.scopes, info):
        finite = np.isfinite(earlier[:, index])
        column = earlier[finite, index]
        if len(column) < settings.minimum or norm.scopes[index] in _not_trained(causes):
            continue
        level = float(usual_levels(steps[finite], column[:, None])[0])
        if 0 < level <= settings.growth * column[0] and last[index] > settings.factor * level:
            ratio = float(last[index]) / level
            bound = settings.factor * level
            yield finding(Severity.WARNING, last[index], bound, norm.scopes[index], level=level, ratio=ratio)


def _not_trained(causes: Panel) -> set[str]:
    """The tensors that no optimizer moves on purpose; the loop may write to them, as to a moving average."""
    on_purpose = causes.last == FrozenCause.ON_PURPOSE.value
    return {scope for scope, is_left in zip(causes.scopes, on_purpose, strict=True) if is_left}


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
    "W104", "weight-shrinking", reads=("weight/norm", "weight/nonfinite", "update/frozen_cause"),
    when=("weight/norm",), per_scope=True, hold=3, keep=200,
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
def weight_shrinking(
    norm: Panel, nonfinite: Panel, causes: Panel, settings: WeightShrinking, info: RunInfo
) -> Iterator[Finding]:
    """A weight norm has fallen to a small fraction of its earlier value.

    ## Why is this bad?
    Weight decay shrinks every weight at every step, and only the gradient restores it. A layer whose norm falls
    tenfold gets too little gradient. It fades out of the model, and so does the signal that it passes on. A weight that
    no optimizer moves, such as a codebook of moving averages, is not reported.

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
    exempt = {scope for scope, count in zip(nonfinite.scopes, nonfinite.last, strict=True) if count > 0}
    exempt |= _not_trained(causes)
    for index in matrices(shrunk, norm.scopes, info):
        if norm.scopes[index] not in exempt:
            yield finding(
                Severity.WARNING, norm.last[index], bound[index], norm.scopes[index],
                began_at=float(norm.values[0, index]), lasting_steps=norm.at - int(norm.steps[0]) + 1,
            )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightDecayDominates(Settings):
    """When `weight-decay-dominates` fires."""

    share: float = between(0.5, 0.0)
    """Decay per step, as a fraction of the whole update, from which the decay outweighs the gradient."""
    decay: float = between(1e-3, 0.0)
    """Minimum decay per step, as a fraction of the weight; a slower decay takes more than a thousand steps to act."""
    part: float = between(0.5, 0.0, 1.0)
    """Fraction of the matrices with weight decay for which that must hold."""
    learned: float = between(0.5, 0.0, 1.0)
    """Fraction of the first loss below which it does not fire: in a minimum, decay and gradient balance."""
    strong: float = between(3e-3, 0.0)
    """Decay per step, as a fraction of the weight, from which it fires all the same: what was learned is gone after a
    few hundred steps."""


@rule(
    "W106", "weight-decay-dominates",
    reads=(
        "monitor/update_ratio_median", "update/ratio", "weight/norm", "gradient/norm", "train/lr", "train/loss",
        "train/loss_level",
    ),
    when=("monitor/update_ratio_median",), per_scope=True, hold=3, keep=100,
    explains=(
        "L103", "L104", "L105", "L107", "L108", "E107", "G103", "G105", "G106", "G107", "U102", "U103", "U104", "W103",
        "W104", "A101", "A104", "E102", "E103", "E105", "E106",
    ),
    settings=WeightDecayDominates,
    message=Message(
        "Weight decay outweighs the gradient",
        "share of the update {value:%} · limit {bound:%} · decay per step {decay:%} · weight decay {weight_decay}",
    ),
    remedies=(
        lower_weight_decay(0.01, "the weights shrink faster than they learn"),
        advise("exempt_from_decay", "Exclude biases and normalization weights from weight decay",
               "decay has no use for them"),
    ),
)  # fmt: skip
def weight_decay_dominates(
    typical: Panel, ratios: Panel, norm: Panel, gradient: Panel, lr: Panel, loss: Panel, levels: Panel,
    settings: WeightDecayDominates, info: RunInfo,
) -> Finding | None:  # fmt: skip
    """Weight decay moves the weights more than the gradient does.

    ## Why is this bad?
    Every step pulls the weights towards zero faster than the loss can teach them anything. It looks like a learning
    rate that is too high, because the updates are large, but a lower one does not help. Common values are 1e-4 to 0.1;
    a weight decay of 1 is far too high for most runs.

    The decay of a step is lr × weight decay, with the momentum of SGD several times that. If the decay is part of the
    gradient and the optimizer divides by its size, as Adam does, weight decay × weight norm is compared with the
    gradient norm. If the loss has already halved, only a strong decay fires, since in a minimum the two balance.

    ## Example
    fires: 0.6x4 | update/ratio{layer.weight} 0.6x4 | train/lr{0} 0.5x4 | group/weight_decay 1.0
    quiet: 0.6x4 | update/ratio{layer.weight} 0.6x4 | train/lr{0} 0.5x4 | group/weight_decay 0.001
    """
    if ratios.at != typical.at or math.isnan(typical.series().last):
        return None
    decays = settings_of(ratios.scopes, "weight_decay", info)
    decayed = is_matrix(ratios.scopes, info) & (decays > 0) & (ratios.last > 0)
    if not decayed.any():
        return None
    rate = float(np.fmax.reduce(lr.last, initial=np.nan)) if len(lr) else np.nan
    moved = ratios.last.astype(np.float64)
    momentum = max((group.get("momentum", 0.0) for group in info.groups), default=0.0)
    with np.errstate(invalid="ignore"):
        decay = rate * decays / (1 - momentum if momentum < 1 and not decays_apart(info) else 1)
    if not (steps_grow_with_gradients(info) or decays_apart(info) or not info.optimizers):
        if norm.scopes != ratios.scopes or gradient.scopes != ratios.scopes:
            return None
        with np.errstate(invalid="ignore", divide="ignore"):
            pull = decays * norm.last
            decay = moved * pull / (pull + gradient.last)
    with np.errstate(invalid="ignore", divide="ignore"):
        shares = decay / moved
    dominated = decayed & (shares >= settings.share) & (decay >= min(settings.decay, settings.strong))
    if np.count_nonzero(dominated) < settings.part * np.count_nonzero(decayed):  # as almost always
        return None
    dominated &= decay >= (settings.decay, settings.strong)[is_solved(loss, levels, settings.learned)]
    if np.count_nonzero(dominated) < settings.part * np.count_nonzero(decayed):
        return None
    return finding(
        Severity.WARNING, min(1.0, median(shares[dominated])), settings.share, decay=median(decay[dominated]),
        weight_decay=float(decays[dominated].max()),
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class StaleCopy(Settings):
    """When `stale-copy` fires."""

    steps: int = between(300, 1, counts="steps")
    """Number of steps for which a copy must not have changed."""
    change: float = between(0.01, 0.0)
    """Change of the norm of a trained matrix, as a fraction, from which it has moved on."""


@rule(
    "W107", "stale-copy", reads=("weight/norm", "update/frozen_cause"), when=("weight/norm",), per_scope=True, keep=200,
    explains=("L103", "L106", "L107"),
    settings=StaleCopy,
    message=Message(
        "{scope} is a copy that is never updated",
        "unchanged for {value} steps · limit {bound} · copy of {original}, which has changed by {moved:%}",
    ),
    remedies=(
        advise("update_copy", "Copy the trained weights into {scope} every few hundred steps, or average them in",
               "a target network that stays at its start gives targets from a random model", scope_is="parameter"),
        advise("leave_out_copy", "If the copy is meant to stay, watch only the model that is trained",
               "a reference model need not be watched"),
    ),
)  # fmt: skip
def stale_copy(norm: Panel, causes: Panel, settings: StaleCopy, info: RunInfo) -> Finding | None:
    """A copy of the trained weights, such as a target network, has stayed at its start.

    ## Why is this bad?
    Targets that come from a copy improve only as the copy does. A target network that is never updated keeps giving the
    values of a random model, and the loss falls all the same. A copy is a part of the model that nothing trains, whose
    tensors all have a trained twin of the same name and shape. It begins with the same values, or gets no gradient
    although it is not frozen: a second head that is frozen, or missing from the optimizer, is no copy.

    ## Example
    fires: weight/norm{q.0.weight} 1.0 _x499 1.5 | weight/norm{target.0.weight} 1.0 _x499 1.0
    quiet: weight/norm{q.0.weight} 1.0 _x499 1.5 | weight/norm{target.0.weight} 1.0 _x499 1.2
    """
    span = norm.at - int(norm.steps[0]) if len(norm) else 0
    if span < settings.steps or not (idle := idle_copies(causes, info)):
        return None
    position = {scope: index for index, scope in enumerate(norm.scopes)}
    for copy, original in idle.items():
        if copy not in position or original not in position or len(info.parameters[copy].shape) < 2:
            continue
        ours, theirs = norm.values[:, position[copy]], norm.values[:, position[original]]
        moved = abs(float(theirs[-1]) / float(theirs[0]) - 1) if theirs[0] > 0 else 0.0
        if np.ptp(ours) == 0 and moved > settings.change:
            return finding(Severity.WARNING, span, settings.steps, copy, original=original, moved=moved)
    return None


@dataclass(frozen=True, kw_only=True)
class WeightThresholds(Settings):
    """The settings of the rules in this file, by the name of the rule."""

    weight_norm_spike: WeightNormSpike = WeightNormSpike()
    weight_norms_apart: WeightNormsApart = WeightNormsApart()
    weight_shrinking: WeightShrinking = WeightShrinking()
    weight_decay_dominates: WeightDecayDominates = WeightDecayDominates()
    stale_copy: StaleCopy = StaleCopy()
