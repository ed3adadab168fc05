"""Rules about how gradients change over the depth of the model and over the run."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from forewarn.judge.headlines import Message
from forewarn.judge.registry import finding, rule
from forewarn.judge.remedies import advise, clip_gradient, lower_lr, raise_lr, warm_up
from forewarn.judge.series import Panel, Series, trailing
from forewarn.judge.tensor_kinds import hold_matrices
from forewarn.settings import Settings, between
from forewarn.types import Finding, RunInfo, Severity

_PARTS = 10
"""The loss has fallen if the newest tenth of its history is below the oldest tenth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientFadesWithDepth(Settings):
    """When `gradient-fades-with-depth` fires."""

    share: float = between(0.01, 0.0, 1.0)
    """Fraction of the last block's gradient norm below which the first block is starved."""
    norm: float = between(1e-4, 0.0)
    """Gradient norm below which the first block is starved; both limits must be crossed."""
    start_steps: int = between(32, 0, counts="steps")
    """First steps, in which nothing is judged: small initial weights let little gradient through."""
    recovery: float = between(2.0, 1.0)
    """Growth of that fraction above which it recovers, from the oldest quarter of the checks in memory to the
    newest."""


@rule(
    "G105", "gradient-fades-with-depth", reads=("gradient/block_norm",), per_scope=True, hold=3, keep=100,
    explains=("G103", "G106", "U103", "A104"),
    settings=GradientFadesWithDepth,
    message=Message(
        "Almost no gradient reaches {scope}",
        "gradient norm {first_norm} · last block {last_norm} · ratio {value:%} · expected at least {bound:%}",
    ),
    remedies=(
        advise("add_residual_connections", "Add a residual connection around each block",
               "it carries the gradient back undiminished"),
        advise("change_activation", "Change the activations to GELU",
               "a sigmoid passes on a quarter of the gradient at most; ReLU and GELU do not saturate", to="gelu"),
        advise("normalize_blocks", "Add a normalization layer at the start of each block",
               "it keeps the scale of each block near 1"),
        advise("raise_initial_scale", "Initialize the weights of the blocks with a larger scale",
               "weights that start too small shrink the gradient once per block"),
    ),
)  # fmt: skip
def gradient_fades_with_depth(norms: Panel, settings: GradientFadesWithDepth) -> Finding | None:
    """Almost no gradient reaches the first blocks of the model.

    ## Why is this bad?
    The backward pass runs from the last block to the first. If every block passes on only a part of the gradient,
    nothing is left for the first ones. They stay at their random start, and the other blocks learn from random
    features. The first block's gradient norm must be small both in itself and as a fraction of the last block's.

    Small initial weights let little gradient through at first. So the rule waits for 32 steps, and while the fraction
    grows.

    ## Example
    fires: gradient/block_norm{first} 1e-6x36 | gradient/block_norm{last} 0.5x36
    quiet: gradient/block_norm{first} 1e-6x30 | gradient/block_norm{last} 0.5x30
    quiet: gradient/block_norm{first} 1e-6+1e-6x40 | gradient/block_norm{last} 0.5x40
    quiet: gradient/block_norm{first} 0.004x36 | gradient/block_norm{last} 0.5x36
    """
    reached = np.flatnonzero(np.isfinite(norms.last) & (norms.last > 0))
    if norms.at < settings.start_steps or len(reached) < 2:
        return None
    low, high = reached[[0, -1]]
    first, last = float(norms.last[low]), float(norms.last[high])
    if not first < min(settings.norm, settings.share * last) or _recovers(norms, low, high, settings.recovery):
        return None
    firsts, lasts = norms.values[:, low], norms.values[:, high]
    starved = (firsts < settings.norm) & (firsts < settings.share * lasts)
    lasting = norms.at + 1 - int(norms.steps[len(norms) - trailing(starved)])
    return finding(
        Severity.WARNING, first / last, settings.share, norms.scopes[low],
        first_norm=first, last_norm=last, lasting_steps=lasting,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientImbalance(Settings):
    """When `gradient-imbalance` fires."""

    factor: float = between(100.0, 1.0)
    """Largest allowed ratio between the gradient norms of two blocks."""
    start_steps: int = between(32, 0, counts="steps")
    """First steps, in which nothing is judged: small initial weights let little gradient through."""
    recovery: float = between(2.0, 1.0)
    """Factor by which the ratio must have fallen to recover, from the oldest quarter of the checks in memory to the
    newest."""


@rule(
    "G106", "gradient-imbalance", reads=("gradient/block_norm",), per_scope=True, hold=3, keep=100,
    settings=GradientImbalance,
    message=Message(
        "Gradients in {scope} are {value:×} smaller than elsewhere",
        "gradient norm {norm} · largest {largest_norm} in {largest_block} · ratio {value} · limit {bound}",
    ),
    remedies=(
        advise("normalize_blocks", "Add a normalization layer at the start of each block",
               "it evens out the gradients that the blocks receive"),
        advise("lr_per_block", "Use Adam, or a separate learning rate for each block",
               "either evens out the steps that the blocks take"),
        advise("inspect_layer", "Check the scale of the weights and the input of {scope}",
               "either can make its gradients this small", scope_is="block"),
    ),
)  # fmt: skip
def gradient_imbalance(norms: Panel, settings: GradientImbalance, info: RunInfo) -> Finding | None:
    """Some blocks have gradients over 100 times larger than others.

    ## Why is this bad?
    All blocks share one learning rate. If it suits the block with the largest gradient, the others barely move, and
    clipping by the global norm leaves them nothing at all. Blocks without any gradient do not count, nor do blocks
    without a matrix, such as a normalization layer in a plain stack. The rule waits for 32 steps, and while the ratio
    falls: small initial weights let little gradient through at first.

    ## Example
    fires: gradient/block_norm{first} 0.001x36 | gradient/block_norm{last} 0.5x36
    quiet: gradient/block_norm{first} 0.001x30 | gradient/block_norm{last} 0.5x30
    quiet: gradient/block_norm{first} 0.0001+0.0001x40 | gradient/block_norm{last} 0.5x40
    quiet: gradient/block_norm{first} 0.01x36 | gradient/block_norm{last} 0.5x36
    """
    counted = np.isfinite(norms.last) & (norms.last > 0) & hold_matrices(norms.scopes, info)
    places, latest = np.flatnonzero(counted), norms.last.astype(np.float64)
    if norms.at < settings.start_steps or len(places) < 2:
        return None
    low, high = int(places[latest[places].argmin()]), int(places[latest[places].argmax()])
    ratio = latest[high] / latest[low]
    if not ratio > settings.factor or _recovers(norms, low, high, settings.recovery):
        return None
    return finding(
        Severity.WARNING, ratio, settings.factor, norms.scopes[low],
        norm=latest[low], largest_block=norms.scopes[high], largest_norm=latest[high],
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientDecay(Settings):
    """When `gradient-decay` fires."""

    share: float = between(0.1, 0.0, 1.0)
    """Fraction of its starting level below which the global gradient norm has decayed: information."""
    warning_share: float = between(0.01, 0.0, 1.0)
    """Fraction of that level below which to warn, unless the loss is falling."""
    learning: float = between(0.05, 0.0, 1.0)
    """Fraction by which the loss must have fallen in memory for the run to count as learning."""
    solved: float = between(0.01, 0.0, 1.0)
    """Fraction of the highest loss below which nothing is left to learn, as where a hinge loss reaches zero."""


@rule(
    "G107", "gradient-decay", reads=("gradient/share_of_start", "train/loss", "train/loss_level"),
    when=("gradient/share_of_start",), hold=3, keep=100,
    settings=GradientDecay,
    message=Message(
        "The gradient norm fell to {value:%} of its starting level",
        "gradient norm {value:%} of the start · expected at least {bound:%} · loss {loss} · earlier {loss_before}",
    ),
    remedies=(
        raise_lr(3.0, "the steps have become too small for what is left to learn"),
        advise("change_activation", "Change the activations to GELU", "saturated or dead units pass on no gradient",
               to="gelu"),
        advise("inspect_data", "Check whether the model predicts the same for every sample",
               "a model that always predicts the mean of the targets has little gradient left"),
    ),
)  # fmt: skip
def gradient_decay(share: Series, loss: Series, levels: Series, settings: GradientDecay) -> Finding | None:
    """The global gradient norm has fallen to a small fraction of its starting level.

    ## Why is this bad?
    In a run that learns, or has reached what it can, this is natural: less is left to correct, and it is information
    only. A norm below 1% of the start with a loss that does not fall is a warning. Units die or saturate, and the
    gradient no longer gets into the model.

    ## Example
    fires: gradient/share_of_start 0.005x3 | train/loss 2.0x50
    quiet: gradient/share_of_start 0.5x3 | train/loss 2.0x50
    """
    if not share.last < settings.share:
        return None
    before, now = loss.ends(_PARTS)
    learns = now < before - settings.learning * abs(before) or abs(now) < (1 - settings.learning) * abs(before)
    highest = max(loss.finite().max(initial=0.0), levels.finite().max(initial=0.0))
    severe = share.last < settings.warning_share and not learns and not abs(now) < settings.solved * highest
    bound = min(settings.share, settings.warning_share) if severe else settings.share  # both were crossed
    return finding(Severity.WARNING if severe else Severity.INFO, share.last, bound, "", loss_before=before, loss=now)


@dataclass(frozen=True, slots=True, kw_only=True)
class GainDrift(Settings):
    """When `gain-drift` fires."""

    mean_gain_drift_threshold: float = between(0.1, 0.0)
    """Rise of the mean gain since the oldest check of the window, as a fraction, that counts as drift."""
    amplification: float = between(20.0, 1.0)
    """Factor by which gradients must grow over all blocks for a drift to matter: a young model drifts anyway."""
    norm_growth: float = between(3.0, 1.0)
    """Multiple of the oldest quarter of the gradient norms in memory above which this is a warning."""
    norm: float = between(30.0, 0.0)
    """Gradient norm above which this is a warning in any case."""


@rule(
    "G110", "gain-drift",
    reads=("gain/drift", "gain/mean", "gain/amplification", "gradient/global_norm", "train/lr", "train/clip"),
    per_scope=True, hold=3, keep=100,
    explains=("G102", "G104"),
    settings=GainDrift,
    message=Message(
        "The blocks amplify gradients more and more",
        "mean gain {mean_gain} · rise {value:%} · limit {bound:%} · gain over all blocks {amplification:×}",
    ),
    remedies=(
        lower_lr(0.5, "smaller steps keep the weights out of the range where blocks amplify"),
        clip_gradient("clipping keeps amplified gradients from moving the weights further"),
        warm_up("the weights find their scale before the steps become large"),
    ),
)  # fmt: skip
def gain_drift(
    drift: Panel, mean: Panel, amplification: Panel, norm: Panel, lr: Panel, clip: Panel, settings: GainDrift
) -> Finding | None:
    """The mean gain of the blocks keeps rising.

    ## Why is this bad?
    The gain of a block is how many times larger the gradient is below it than above it. Gains multiply over the depth:
    with 24 blocks, a gain of 1.1 is a factor of 10, and 1.2 a factor of 80. The mean gain rises before the gradients
    explode, and long before the loss does.

    Between batches it varies by a few hundredths. It moves more in a young model while the layers settle, so the rule
    is quiet while the product over all blocks is small.

    ## Example
    fires: gain/drift 0.15x3 | gain/mean 1.3x3 | gain/amplification 25x3
    quiet: gain/drift 0.05x3 | gain/mean 1.3x3 | gain/amplification 25x3
    quiet: gain/drift 0.15x3 | gain/mean 1.2x3 | gain/amplification 5x3
    """
    rise, product = drift.series().last, amplification.series().last
    if not (rise > settings.mean_gain_drift_threshold and product > settings.amplification):
        return None
    return finding(
        _severity(norm, settings.norm_growth, settings.norm), rise, settings.mean_gain_drift_threshold, "",
        mean_gain=mean.series().last, amplification=product, **_in_force(lr, clip),
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class GainTooHigh(Settings):
    """When `gain-too-high` fires."""

    amplification: float = between(30.0, 1.0)
    """Factor by which gradients may grow from the last block to the first; n blocks may each have its n-th root."""
    mean_gain_absolute_threshold: float | None = None
    """Largest allowed mean gain per block, in place of the one derived from `amplification` and the depth."""
    norm_growth: float = between(3.0, 1.0)
    """Multiple of the oldest quarter of the gradient norms in memory above which this is a warning."""
    norm: float = between(30.0, 0.0)
    """Gradient norm above which this is a warning in any case."""


@rule(
    "G111", "gain-too-high",
    reads=("gain/mean", "gain/amplification", "gradient/global_norm", "train/lr", "train/clip"),
    per_scope=True, hold=3, keep=100,
    explains=("G102", "G104", "G110", "L102", "L103", "L107", "L108", "E107", "U102", "A108"),
    settings=GainTooHigh,
    message=Message(
        "Each block amplifies gradients {value:×}",
        "gain per block {value} · limit {bound} · blocks {depth} · gain over all blocks {amplification:×}",
    ),
    remedies=(
        lower_lr(0.5, "smaller steps keep the weights from growing further into the range where blocks amplify"),
        clip_gradient("clipping keeps amplified gradients from moving the weights further"),
        warm_up("the weights find their scale before the steps become large"),
        advise("lower_initial_scale", "Initialize the weights of the blocks with a smaller scale",
               "weights that start too large amplify the gradient once per block"),
    ),
)  # fmt: skip
def gain_too_high(
    mean: Panel, amplification: Panel, norm: Panel, lr: Panel, clip: Panel, settings: GainTooHigh, info: RunInfo
) -> Finding | None:
    """The blocks amplify the gradient so much that it explodes over the depth.

    ## Why is this bad?
    Gradients flow from the last block to the first, and each block multiplies them by its gain. The limit for one block
    follows from the limit for all of them. For a factor of 30 end to end, 6 blocks may have a gain of 1.76 each, 24
    blocks only 1.15. Above that, the first blocks take steps many times larger than the last, and a slightly unusual
    batch becomes a spike.

    If the gradient norm is neither large nor growing, this is information only: the first block of a small model may
    amplify by nature.

    ## Example
    fires: gain/mean 1.3x3 | gain/amplification 540x3
    quiet: gain/mean 1.3x3 | gain/amplification 4.8x3
    """
    gain = mean.series().last
    product = amplification.series().last if amplification.at == mean.at else np.nan
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


def _recovers(norms: Panel, small: int, large: int, factor: float) -> bool:
    """Whether a block's gradient, as a fraction of another's, is this much larger than it was."""
    with np.errstate(divide="ignore", invalid="ignore"):
        fractions = Series.of(norms.values[:, small] / norms.values[:, large])
    before, now = fractions.ends(4)
    return now > factor * before


def _severity(norm: Panel, growth: float, large: float) -> Severity:
    """A warning if the gradient norm is large or has grown; otherwise the amplification is harmless."""
    before, now = norm.series().ends(4)
    return Severity.INFO if now <= large and now <= growth * before else Severity.WARNING


def _in_force(lr: Panel, clip: Panel) -> dict[str, float]:
    """The current learning rate and clip value, shown with the finding."""
    rates, bounds = lr.last[np.isfinite(lr.last)], clip.series().finite(1)
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
