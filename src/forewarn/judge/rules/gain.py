"""Rules about how gradients change over the depth of the model, and over the run."""

from __future__ import annotations

import numpy as np

from forewarn.judge.registry import found, rule
from forewarn.judge.remedies import advise, clip_gradient, lower_lr, raise_lr, warm_up
from forewarn.judge.series import Panel, Series
from forewarn.judge.tensor_kinds import hold_matrices
from forewarn.thresholds.gradients import (
    GainDrift,
    GainTooHigh,
    GradientDecay,
    GradientFadesWithDepth,
    GradientImbalance,
)
from forewarn.types import Finding, RunInfo, Severity


@rule(
    "G105", "gradient-fades-with-depth", reads=("gradient/block_norm",), per_scope=True, hold=3, keep=100,
    explains=("G103", "G106", "U103"),
    remedies=(
        advise("add_residual_connections", "a path around each block carries the gradient down undiminished"),
        advise("change_activation", "a sigmoid passes on a quarter of the gradient at most; ReLU and GELU do not "
               "saturate", to="gelu"),
        advise("normalise_blocks", "a normalisation layer at the entrance of each block keeps its scale near 1"),
        advise("raise_initial_scale", "weights that start too small shrink the gradient once per block"),
    ),
)  # fmt: skip
def gradient_fades_with_depth(norms: Panel, config: GradientFadesWithDepth) -> Finding | None:
    """Gradient that hardly reaches the first blocks of the model.

    ## Why is this bad?
    The backward pass goes from the last block to the first. Where every block passes on only a part, nothing is left
    at the first ones: they stay at their random start, and the others learn from what these make of the data. The
    share of the last block's gradient norm and the norm itself must both be small.

    ## Example
    fires: gradient/block_norm{first} 1e-6x3 | gradient/block_norm{last} 0.5x3
    quiet: gradient/block_norm{first} 0.004x3 | gradient/block_norm{last} 0.5x3
    """
    at, first, last = _ends(norms)
    if not first < min(config.norm, config.share * last):
        return None
    return found(Severity.WARNING, first / last, config.share, at, first_norm=first, last_norm=last)


@rule(
    "G106", "gradient-imbalance", reads=("gradient/block_norm",), per_scope=True, hold=3, keep=100,
    remedies=(
        advise("normalise_blocks", "a normalisation layer at the entrance of each block evens out what they receive"),
        advise("lr_per_block", "an optimizer that scales each weight by itself (Adam), or a rate per block, evens out "
               "what they do with it"),
        advise("inspect_layer", "look at the scale of this block's weights and of its input", scope_is="block"),
    ),
)  # fmt: skip
def gradient_imbalance(norms: Panel, config: GradientImbalance, info: RunInfo) -> Finding | None:
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
    now = np.where(counted, norms.last, np.nan).astype(np.float64)
    if len(norms) < config.minimum or np.isfinite(now).sum() < 2:
        return None
    low, high = int(np.nanargmin(now)), int(np.nanargmax(now))
    ratio = now[high] / now[low]
    if not ratio > config.factor:
        return None
    return found(
        Severity.WARNING, ratio, config.factor, norms.scopes[low],
        norm=now[low], largest_block=norms.scopes[high], largest_norm=now[high],
    )  # fmt: skip


@rule(
    "G107", "gradient-decay", reads=("gradient/share_of_start", "train/loss"), hold=3, keep=100,
    remedies=(
        raise_lr(3.0, "the steps have become too small for what is left to learn"),
        advise("change_activation", "units that have saturated or died pass no gradient on", to="gelu"),
        advise("inspect_data", "a model that has fallen back to the mean of the targets has little gradient left"),
    ),
)  # fmt: skip
def gradient_decay(share: Series, loss: Series, config: GradientDecay) -> Finding | None:
    """Global gradient norm that has fallen to a small part of what the run began with.

    ## Why is this bad?
    In a run that learns, or has come to what it can reach, it is natural: what is left to correct becomes less, and
    this is information only. A hundredth, with a loss that does not fall, means that the way of the gradient into the
    model is closing, as units die or saturate.

    ## Example
    fires: gradient/share_of_start 0.005x3 | train/loss 2.0x50
    quiet: gradient/share_of_start 0.5x3 | train/loss 2.0x50
    """
    if not share.last < config.share:
        return None
    seen = loss.finite()
    part = max(1, len(seen) // 10)
    before, now = (float(np.median(each)) if len(each) else np.nan for each in (seen[:part], seen[-part:]))
    learns = now < before - config.learning * abs(before) or abs(now) < (1 - config.learning) * abs(before)
    severe = share.last < config.warning_share and not learns
    return found(
        Severity.WARNING if severe else Severity.INFO, share.last, config.share, "", loss_before=before, loss=now
    )


@rule(
    "G110", "gain-drift",
    reads=("gain/drift", "gain/mean", "gain/amplification", "gradient/global_norm", "train/lr", "train/clip"),
    per_scope=True, hold=3, keep=100,
    explains=("G102", "G104"),
    remedies=(
        lower_lr(0.5, "the weights then grow no further into the range where blocks amplify"),
        clip_gradient("a lower bound keeps amplified gradients from moving the weights further"),
        warm_up("the weights find their scale before the steps are large"),
    ),
)  # fmt: skip
def gain_drift(
    drift: Panel, mean: Panel, amplification: Panel, norm: Panel, lr: Panel, clip: Panel, config: GainDrift
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
    if not (rise > config.mean_gain_drift_threshold and product > config.amplification):
        return None
    return found(
        _severity(norm, config.norm_growth, config.norm), rise, config.mean_gain_drift_threshold, "",
        mean_gain=Series(mean).last, amplification=product, **_settings(lr, clip),
    )  # fmt: skip


@rule(
    "G111", "gain-too-high",
    reads=("gain/mean", "gain/amplification", "gradient/global_norm", "train/lr", "train/clip"),
    per_scope=True, hold=3, keep=100,
    explains=("G102", "G104", "G110", "L102", "L103", "U102"),
    remedies=(
        lower_lr(0.5, "the weights then grow no further into the range where blocks amplify"),
        clip_gradient("a lower bound keeps amplified gradients from moving the weights further"),
        warm_up("the weights find their scale before the steps are large"),
        advise("lower_initial_scale", "weights that start too large amplify once per block"),
    ),
)  # fmt: skip
def gain_too_high(
    mean: Panel, amplification: Panel, norm: Panel, lr: Panel, clip: Panel, config: GainTooHigh, info: RunInfo
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
    now, product = Series(mean).last, Series(amplification).last
    depth = max(1, info.depth)
    if config.mean_gain_absolute_threshold is not None:
        value, bound = now, config.mean_gain_absolute_threshold
    else:
        value, bound = max(product, 0.0) ** (1 / depth), config.amplification ** (1 / depth)
    if not value > bound:
        return None
    return found(
        _severity(norm, config.norm_growth, config.norm), value, bound, "",
        mean_gain=now, amplification=product, depth=depth, **_settings(lr, clip),
    )  # fmt: skip


def _ends(norms: Panel) -> tuple[str, float, float]:
    """The first block that has a gradient, its norm, and that of the last block."""
    known = np.flatnonzero(np.isfinite(norms.last) & (norms.last > 0))
    if len(known) < 2:
        return "", np.nan, np.nan
    return norms.scopes[known[0]], float(norms.last[known[0]]), float(norms.last[known[-1]])


def _severity(norm: Panel, growth: float, large: float) -> Severity:
    """A warning where the gradient norm has grown too, or is large; amplification that it does not show is harmless."""
    norms = Series(norm).finite()
    if not len(norms):
        return Severity.WARNING
    part = max(1, len(norms) // 4)
    before, now = np.median(norms[:part]), np.median(norms[-part:])
    return Severity.WARNING if now > large or now > growth * before else Severity.INFO


def _settings(lr: Panel, clip: Panel) -> dict[str, float]:
    """The learning rate and the clip value in force, for a person to see beside the finding."""
    rates, bounds = lr.last[np.isfinite(lr.last)], Series(clip).finite(1)
    return {
        **({"lr": float(rates.max())} if len(rates) else {}),
        **({"clip": float(bounds[-1])} if len(bounds) else {}),
    }
