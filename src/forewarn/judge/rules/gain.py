"""Rules about how gradients change with the depth of the model, and over the run."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from forewarn.judge.headlines import Message
from forewarn.judge.registry import finding, rule
from forewarn.judge.remedies import advise, clip_gradient, lower_lr, raise_lr, warm_up
from forewarn.judge.series import Panel, Series
from forewarn.judge.tensor_kinds import hold_matrices
from forewarn.settings import Settings, between
from forewarn.types import Finding, RunInfo, Severity

_PARTS = 10
"""A loss has fallen if the latest tenth in memory is below the oldest tenth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientFadesWithDepth(Settings):
    """When `gradient-fades-with-depth` fires."""

    share: float = between(0.01, 0.0, 1.0)
    """Share of the last block's gradient norm below which the first block is starved."""
    norm: float = between(1e-4, 0.0)
    """Gradient norm below which a first block is starved in absolute terms; both must hold."""


@rule(
    "G105", "gradient-fades-with-depth", reads=("gradient/block_norm",), per_scope=True, hold=3, keep=100,
    explains=("G103", "G106", "U103"),
    settings=GradientFadesWithDepth,
    message=Message(
        "Almost no gradient reaches {scope}",
        "gradient norm {first_norm} · in the last block {last_norm} · share {value:%} · limit {bound:%}",
    ),
    remedies=(
        advise("add_residual_connections", "Add residual connections", "a path around each block carries the gradient down undiminished"),
        advise("change_activation", "Change activation", "a sigmoid passes on a quarter of the gradient at most; ReLU and GELU do not "
               "saturate", to="gelu"),
        advise("normalise_blocks", "Normalise blocks", "a normalisation layer at the entrance of each block keeps its scale near 1"),
        advise("raise_initial_scale", "Raise initial scale", "weights that start too small shrink the gradient once per block"),
    ),
)  # fmt: skip
def gradient_fades_with_depth(norms: Panel, settings: GradientFadesWithDepth) -> Finding | None:
    """Gradient that hardly reaches the first blocks of the model.

    ## Why is this bad?
    The backward pass goes from the last block to the first. Where every block passes on only a part, nothing is left
    at the first ones: they stay at their random start, and the others learn from what these make of the data. The
    share of the last block's gradient norm and the norm itself must both be small.

    ## Example
    fires: gradient/block_norm{first} 1e-6x3 | gradient/block_norm{last} 0.5x3
    quiet: gradient/block_norm{first} 0.004x3 | gradient/block_norm{last} 0.5x3
    """
    block, first, last = _ends(norms)
    if not first < min(settings.norm, settings.share * last):
        return None
    return finding(Severity.WARNING, first / last, settings.share, block, first_norm=first, last_norm=last)


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientImbalance(Settings):
    """When `gradient-imbalance` fires."""

    factor: float = between(100.0, 1.0)
    """Largest over smallest gradient norm among the blocks."""
    minimum: int = between(8, 1, counts="readings")
    """Checks that must have been seen before anything is judged."""


@rule(
    "G106", "gradient-imbalance", reads=("gradient/block_norm",), per_scope=True, hold=3, keep=100,
    settings=GradientImbalance,
    message=Message(
        "Gradients differ {value}× between blocks",
        "gradient norm {largest_norm} in {largest_block} · {norm} in {scope} · limit {bound}×",
    ),
    remedies=(
        advise("normalise_blocks", "Normalise blocks", "a normalisation layer at the entrance of each block evens out what they receive"),
        advise("lr_per_block", "Lr per block", "an optimizer that scales each weight by itself (Adam), or a rate per block, evens out "
               "what they do with it"),
        advise("inspect_layer", "Inspect layer", "look at the scale of this block's weights and of its input", scope_is="block"),
    ),
)  # fmt: skip
def gradient_imbalance(norms: Panel, settings: GradientImbalance, info: RunInfo) -> Finding | None:
    """Gradients of some blocks that are hundreds of times those of others.

    ## Why is this bad?
    One learning rate serves all blocks. Where it suits the block with the largest gradient the others stand still, and
    clipping by the global norm leaves them nothing at all. Blocks without any gradient are not counted, nor are those
    that hold no matrix, such as a normalisation layer in a plain stack.

    ## Example
    fires: gradient/block_norm{first} 0.001x10 | gradient/block_norm{last} 0.5x10
    quiet: gradient/block_norm{first} 0.01x10 | gradient/block_norm{last} 0.5x10
    """
    counted = np.isfinite(norms.last) & (norms.last > 0) & hold_matrices(norms.scopes, info)
    latest = np.where(counted, norms.last, np.nan).astype(np.float64)
    if len(norms) < settings.minimum or np.isfinite(latest).sum() < 2:
        return None
    low, high = int(np.nanargmin(latest)), int(np.nanargmax(latest))
    ratio = latest[high] / latest[low]
    if not ratio > settings.factor:
        return None
    return finding(
        Severity.WARNING, ratio, settings.factor, norms.scopes[low],
        norm=latest[low], largest_block=norms.scopes[high], largest_norm=latest[high],
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientDecay(Settings):
    """When `gradient-decay` fires."""

    share: float = between(0.1, 0.0, 1.0)
    """Share of its starting level below which the global gradient norm has decayed: information."""
    warning_share: float = between(0.01, 0.0, 1.0)
    """The share at which to warn, if the loss does not fall."""
    learning: float = between(0.05, 0.0, 1.0)
    """Share by which the loss must have fallen within memory for the decay to be that of a run that learns."""


@rule(
    "G107", "gradient-decay", reads=("gradient/share_of_start", "train/loss"), hold=3, keep=100,
    settings=GradientDecay,
    message=Message(
        "The gradient norm has fallen to {value:%} of its first level",
        "share {value:%} · limit {bound:%} · loss {loss} · earlier {loss_before}",
    ),
    remedies=(
        raise_lr(3.0, "the steps have become too small for what is left to learn"),
        advise("change_activation", "Change activation", "units that have saturated or died pass no gradient on", to="gelu"),
        advise("inspect_data", "Inspect data", "a model that has fallen back to the mean of the targets has little gradient left"),
    ),
)  # fmt: skip
def gradient_decay(share: Series, loss: Series, settings: GradientDecay) -> Finding | None:
    """Global gradient norm that has fallen to a small part of what the run began with.

    ## Why is this bad?
    In a run that learns, or has come to what it can reach, it is natural: what is left to correct becomes less, and
    this is information only. A hundredth, with a loss that does not fall, means that the way of the gradient into the
    model is closing, as units die or saturate.

    ## Example
    fires: gradient/share_of_start 0.005x3 | train/loss 2.0x50
    quiet: gradient/share_of_start 0.5x3 | train/loss 2.0x50
    """
    if not share.last < settings.share:
        return None
    before, now = loss.ends(_PARTS)
    learns = now < before - settings.learning * abs(before) or abs(now) < (1 - settings.learning) * abs(before)
    severe = share.last < settings.warning_share and not learns
    return finding(
        Severity.WARNING if severe else Severity.INFO, share.last, settings.share, "", loss_before=before, loss=now
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GainDrift(Settings):
    """When `gain-drift` fires."""

    mean_gain_drift_threshold: float = between(0.1, 0.0)
    """Share above the oldest check of the window at which the mean gain has drifted."""
    amplification: float = between(20.0, 1.0)
    """Times that gradients must grow over the whole depth for a drift to matter: a young model drifts as it learns."""
    norm_growth: float = between(3.0, 1.0)
    """Times the oldest quarter of the gradient norms in memory above which this is a warning."""
    norm: float = between(30.0, 0.0)
    """Gradient norm above which it is one in any case."""


@rule(
    "G110", "gain-drift",
    reads=("gain/drift", "gain/mean", "gain/amplification", "gradient/global_norm", "train/lr", "train/clip"),
    per_scope=True, hold=3, keep=100,
    explains=("G102", "G104"),
    settings=GainDrift,
    message=Message(
        "The blocks amplify gradients more and more",
        "mean gain {mean_gain} · rise {value:%} · limit {bound:%} · growth over the depth {amplification}×",
    ),
    remedies=(
        lower_lr(0.5, "the weights then grow no further into the range where blocks amplify"),
        clip_gradient("a lower bound keeps amplified gradients from moving the weights further"),
        warm_up("the weights find their scale before the steps are large"),
    ),
)  # fmt: skip
def gain_drift(
    drift: Panel, mean: Panel, amplification: Panel, norm: Panel, lr: Panel, clip: Panel, settings: GainDrift
) -> Finding | None:
    """Mean gain of the blocks that keeps rising.

    ## Why is this bad?
    The gain of a block says how much larger the gradient is below it than above it. Gains multiply over the depth: in
    a model of 24 blocks a gain of 1.1 is a factor of 10, one of 1.2 a factor of 80. A rise of the mean comes before
    the gradients explode, and long before the loss does. Between batches it varies by a few hundredths. A young model
    moves more as its layers find their place, so nothing is said while the product over all blocks is small.

    ## Example
    fires: gain/drift 0.15x3 | gain/mean 1.3x3 | gain/amplification 25x3
    quiet: gain/drift 0.05x3 | gain/mean 1.3x3 | gain/amplification 25x3
    quiet: gain/drift 0.15x3 | gain/mean 1.2x3 | gain/amplification 5x3
    """
    rise, product = Series(drift).last, Series(amplification).last
    if not (rise > settings.mean_gain_drift_threshold and product > settings.amplification):
        return None
    return finding(
        _severity(norm, settings.norm_growth, settings.norm), rise, settings.mean_gain_drift_threshold, "",
        mean_gain=Series(mean).last, amplification=product, **_in_force(lr, clip),
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class GainTooHigh(Settings):
    """When `gain-too-high` fires."""

    amplification: float = between(30.0, 1.0)
    """Times that a gradient may grow from last to first block; the gain allowed to n blocks is its n-th root."""
    mean_gain_absolute_threshold: float | None = None
    """The allowed mean gain per block, instead of the one that follows from `amplification` and the depth."""
    norm_growth: float = between(3.0, 1.0)
    """Times the oldest quarter of the gradient norms in memory above which this is a warning."""
    norm: float = between(30.0, 0.0)
    """Gradient norm above which it is one in any case."""


@rule(
    "G111", "gain-too-high",
    reads=("gain/mean", "gain/amplification", "gradient/global_norm", "train/lr", "train/clip"),
    per_scope=True, hold=3, keep=100,
    explains=("G102", "G104", "G110", "L102", "L103", "U102"),
    settings=GainTooHigh,
    message=Message(
        "Each block amplifies the gradient {value}×",
        "mean gain {value} · limit {bound} · over {depth} blocks {amplification}×",
    ),
    remedies=(
        lower_lr(0.5, "the weights then grow no further into the range where blocks amplify"),
        clip_gradient("a lower bound keeps amplified gradients from moving the weights further"),
        warm_up("the weights find their scale before the steps are large"),
        advise("lower_initial_scale", "Lower initial scale", "weights that start too large amplify once per block"),
    ),
)  # fmt: skip
def gain_too_high(
    mean: Panel, amplification: Panel, norm: Panel, lr: Panel, clip: Panel, settings: GainTooHigh, info: RunInfo
) -> Finding | None:
    """Blocks that amplify the gradient so much that over the depth it explodes.

    ## Why is this bad?
    Gradients flow from the last block to the first, and each block multiplies them by its gain. What one block may
    have follows from what all together may have: with 30 times end to end, 6 blocks may have a gain of 1.76 each, 24
    blocks only 1.15. Above it the first blocks take steps that are many times those of the last, and a batch that is
    a little unusual becomes a spike. Where the gradient norm has neither grown nor is large, this is information: the
    first block of a small model may amplify by nature.

    ## Example
    fires: gain/mean 1.3x3 | gain/amplification 540x3
    quiet: gain/mean 1.3x3 | gain/amplification 4.8x3
    """
    gain = Series(mean).last
    product = Series(amplification).last if amplification.at == mean.at else np.nan
    depth = max(1, info.depth)
    if settings.mean_gain_absolute_threshold is not None:
        value, bound = gain, settings.mean_gain_absolute_threshold
    else:
        value, bound = max(product, 0.0) ** (1 / depth), settings.amplification ** (1 / depth)
    if not value > bound:
        return None
    return finding(
        _severity(norm, settings.norm_growth, settings.norm), value, bound, "",
        mean_gain=gain, amplification=product, depth=depth, **_in_force(lr, clip),
    )  # fmt: skip


def _ends(norms: Panel) -> tuple[str, float, float]:
    """The first block that has a gradient, its norm, and that of the last block."""
    indices = np.flatnonzero(np.isfinite(norms.last) & (norms.last > 0))
    if len(indices) < 2:
        return "", np.nan, np.nan
    return norms.scopes[indices[0]], float(norms.last[indices[0]]), float(norms.last[indices[-1]])


def _severity(norm: Panel, growth: float, large: float) -> Severity:
    """A warning if the gradient norm has also grown or is large; otherwise the amplification is harmless."""
    before, now = Series(norm).ends(4)
    return Severity.INFO if now <= large and now <= growth * before else Severity.WARNING


def _in_force(lr: Panel, clip: Panel) -> dict[str, float]:
    """The current learning rate and clip value, shown with the finding."""
    rates, bounds = lr.last[np.isfinite(lr.last)], Series(clip).finite(1)
    return {
        **({"lr": float(rates.max())} if len(rates) else {}),
        **({"clip": float(bounds[-1])} if len(bounds) else {}),
    }


@dataclass(frozen=True, kw_only=True)
class GainThresholds(Settings):
    """The settings of the rules in this file, by the name of the rule."""

    gradient_fades_with_depth: GradientFadesWithDepth = GradientFadesWithDepth()
    gradient_imbalance: GradientImbalance = GradientImbalance()
    gradient_decay: GradientDecay = GradientDecay()
    gain_drift: GainDrift = GainDrift()
    gain_too_high: GainTooHigh = GainTooHigh()
