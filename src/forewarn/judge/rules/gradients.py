"""Rules about gradients."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from forewarn.judge.headlines import Message
from forewarn.judge.history import History
from forewarn.judge.intermittence import idle_too_long
from forewarn.judge.objective import is_objective
from forewarn.judge.optimizers import decays_apart, steps_grow_with_gradients
from forewarn.judge.registry import NOT_FINITE, Gate, Outside, finding, rule
from forewarn.judge.remedies import (
    advise,
    clip_gradient,
    for_cause,
    lower_beta2,
    lower_lr,
    raise_clip,
    raise_lr,
    roll_back,
    skip_batch,
    snapshot,
    warm_up,
)
from forewarn.judge.series import MAD_TO_STD, Panel, Series, median
from forewarn.judge.spike import Spike
from forewarn.judge.tensor_kinds import layer_of, matrices, never_called, num_elements, side_outputs
from forewarn.settings import Settings, between
from forewarn.types import Finding, RunInfo, Severity


@rule(
    "G101", "non-finite-gradient", reads=("gradient/global_norm", "gradient/nonfinite", "update/optimizer_steps"),
    when=("gradient/global_norm", "gradient/nonfinite"), per_scope=True, keep=50,
    gate=lambda _settings, _info: NOT_FINITE,
    explains=("L101", "W101", "A103", "M101"),
    message=(
        Message(
            "Gradients contain NaN or infinity",
            "gradient norm {value} · affected tensors {num_tensors}",
            "in the backward pass it first appears near {nearest_the_output}",
        ),
        Message(
            "The gradient of {scope} contains NaN or infinity",
            "non-finite values {value} · affected tensors {num_tensors}",
        ),
        Message("Gradients contain NaN or infinity", "gradient norm {value}"),
    ),
    remedies=(
        for_cause("start", advise(
            "check_loss_scale", "Lower the loss scale, or compute in float32 or bfloat16",
            "the gradients of the very first step overflow although the loss is finite; without a loss scale, look for "
            "a square root or a norm at zero",
        )),
        for_cause("batch", skip_batch("a step with these gradients ruins every weight that they reach")),
        roll_back(),
        advise("find_operation", "Run step {step} under `torch.autograd.detect_anomaly()`",
               "it names the operation: look for sqrt, log, norm and division at zero", scope_is="parameter"),
        advise("raise_epsilon", "Raise the epsilon in divisions and norms to {to}",
               "a division by almost zero is the usual cause", to=1e-5),
        lower_lr(0.5, "if the gradients grew before they overflowed, the steps were too large"),
        snapshot(),
    ),
)  # fmt: skip
def non_finite_gradient(norm: Panel, nonfinite: Panel, steps: Panel, info: RunInfo) -> Iterator[Finding]:
    """Gradients contain NaN or infinite values.

    ## Why is this bad?
    The next optimizer step writes them into the weights and into its own moments, where they stay for good. If the loss
    is finite, the cause is in the backward pass. Look for a square root, a logarithm or a norm at zero, a division by
    almost zero, or an overflow in half precision.

    Steps that a gradient scaler skips for this reason do not count. If the optimizer did not step with these gradients,
    because the loop checks them or the scaler is not known yet, this is information only.

    The backward pass runs from the output to the input and carries non-finite values along. The cause is therefore
    closest to the affected tensor nearest the output, which the evidence names: `nearest_the_output`.

    ## Example
    fires: 1.0x5 nan
    fires: 1.0x5 nan | gradient/nonfinite{layer.weight} 0x5 12
    fires: gradient/nonfinite{layer.weight} 0x5 12
    quiet: 1.0-0.1x6
    quiet: 1.0x5 1e30 | gradient/nonfinite{layer.weight} 0x6
    """
    now, whole = max(norm.at, nonfinite.at), norm.series()
    if nonfinite.at != now and math.isfinite(whole.last):
        return
    bad = np.flatnonzero(nonfinite.last > 0) if nonfinite.at == now else np.empty(0, np.intp)
    left_out = steps.at == now and steps.series().last == 0
    severity = Severity.INFO if left_out else Severity.CRITICAL
    at_start = len(whole) > 0 and whole.steps[0] <= info.first_step and not np.isfinite(whole.values[0])
    evidence: dict[str, float | str] = {"cause": "start" if at_start else "batch"}
    evidence |= {"optimizer_steps": 0} if left_out else {}
    if whole.at == now and len(whole) and not math.isfinite(whole.last):
        yield finding(severity, whole.last, 0.0, "", **_origin(nonfinite, bad, info), **evidence)
    for index in bad:
        yield finding(severity, nonfinite.last[index], 0.0, nonfinite.scopes[index], num_tensors=len(bad), **evidence)


def _origin(nonfinite: Panel, bad: NDArray[np.intp], info: RunInfo) -> dict[str, float | str]:
    """The number of affected tensors, and the first of them that the backward pass reached."""
    if not len(bad):
        return {}
    order = {scope: place for place, scope in enumerate(info.parameters)}
    last = max((nonfinite.scopes[index] for index in bad), key=lambda scope: order.get(scope, -1))
    return {"num_tensors": len(bad), "nearest_the_output": last}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplodingGradient(Settings):
    """When `exploding-gradient` fires."""

    warning: float = between(100.0, 0.0)
    """Global gradient norm, before clipping, above which to warn, per unit of a loss above 1."""
    critical: float = between(1000.0, 0.0)
    """Global gradient norm, before clipping, that is critical, per unit of a loss above 1."""
    largest_loss: float = between(1e4, 1.0)
    """Largest loss that raises these limits: an even larger one has itself exploded."""
    factor: float = between(10.0, 1.0)
    """Multiple of the run's usual norm, once it has one, that the norm must exceed as well."""
    minimum: int = between(32, 2, counts="readings")
    """Number of norms that make a usual norm."""
    first_steps: int = between(3, 1, counts="readings")
    """Number of norms to wait for if the first one exceeds the warning limit, but not the critical one."""
    overshoot_steps: int = between(10, 0, counts="steps")
    """First steps, in which a norm above the warning limit must follow another: the first steps of Adam are its
    largest, and may overshoot once."""


@rule(
    "G102", "exploding-gradient",
    reads=("gradient/global_norm", "gradient/norm", "train/loss", "train/loss_level", "update/separate_losses"),
    when=("gradient/global_norm",), per_scope=True, keep=50,
    gate=lambda settings, _info: Outside(high=settings.warning),
    explains=("L101", "L102", "L107", "L108", "E107", "G101", "U102", "U104", "M102", "M103"),
    settings=ExplodingGradient,
    message=(
        Message(
            "Gradients are exploding",
            "gradient norm before clipping {value} · limit {bound} · largest {largest_norm} in {largest_tensor}",
        ),
        Message("Gradients are exploding", "gradient norm before clipping {value} · limit {bound}"),
    ),
    remedies=(
        for_cause("start", advise(
            "inspect_initialization", "Check the initial weights and the scale of the inputs",
            "the gradients were too large before the first step was taken",
        )),
        clip_gradient(), lower_lr(0.5), warm_up(),
        advise("inspect_batch", "Check whether the loss of step {step} is a sum over the batch",
               "with a sum in place of a mean, the gradient grows with the size of the batch"),
    ),
)  # fmt: skip
def exploding_gradient(
    norm: Panel, tensors: Panel, loss: Panel, levels: Panel, separate: Panel, settings: ExplodingGradient,
    info: RunInfo,
) -> Finding | None:  # fmt: skip
    """Gradients are too large: their global norm, before clipping, is much larger than it should be.

    ## Why is this bad?
    Without clipping, such a step throws the weights far away. With clipping, only the direction of the gradient is
    left, and the largest tensor alone decides it. A healthy norm is between 0.1 and 10 for most models with a mean
    loss.

    A loss that is a sum over the batch has larger norms by nature. So the limits grow with the best level of a loss
    above 1, and a norm that is usual for the run does not fire. The first step alone may have a large gradient, as
    where a normalization divides by almost nothing: it is a warning if the third step still has it. If the loss is not
    the objective, as in reinforcement learning, gradients grow with the return: the severity is then one level lower.

    ## Example
    fires: 1.0x20 150.0
    fires: 1.0x20 150.0 | gradient/norm{layer.weight} 0.5x20 140.0
    quiet: 1.0x20 90.0
    quiet: 150.0x20 | train/loss 1000.0x20
    quiet: 20.0x40 150.0
    """
    whole = norm.series()
    if not settings.warning < whole.last < math.inf:
        return None
    scale = min(max(1.0, _loss_scale(loss.series(), levels.series())), settings.largest_loss)
    usual = settings.factor * whole.median(len(whole), skip=1) if len(whole) > settings.minimum else 0.0
    warning, critical = max(settings.warning * scale, usual), max(settings.critical * scale, usual)
    if not whole.last > warning:
        return None
    severity = Severity.CRITICAL if whole.last > critical else Severity.WARNING
    bound = critical if severity is Severity.CRITICAL else warning
    if not is_objective(loss.series(), separate.series(), info):
        severity = Severity(severity - 1)
    from_the_start = _began_high(whole, warning)
    if from_the_start and severity < Severity.CRITICAL and len(whole) < settings.first_steps:
        return None
    is_early = whole.at < settings.overshoot_steps and len(whole) > 1
    if is_early and not whole.last > critical and not whole.values[-2] > warning:
        return None
    evidence: dict[str, float | str] = {"cause": "start"} if from_the_start else {}
    if tensors.at == norm.at and not np.isnan(tensors.last).all():
        largest = int(np.nanargmax(tensors.last))
        evidence |= {"largest_tensor": tensors.scopes[largest], "largest_norm": float(tensors.last[largest])}
    return finding(severity, whole.last, bound, "", **evidence)


def _began_high(norm: Series, limit: float) -> bool:
    """Whether the gradients of the very first step were beyond the limit already."""
    return bool(norm.steps[0] == 0 and norm.values[0] > limit)


def _loss_scale(loss: Series, levels: Series) -> float:
    """The size of the loss when it is at its best, or its usual size if it changes sign; 0 if it is unknown.

    A loss that explodes with its gradients must not raise its own limit.
    """
    losses = np.concatenate([levels.finite(), loss.finite()])
    if not len(losses):
        return 0.0
    one_sided = losses.min() > 0 or losses.max() < 0
    return float(np.abs(losses).min() if one_sided else np.median(np.abs(losses)))


@dataclass(frozen=True, slots=True, kw_only=True)
class VanishingGradient(Settings):
    """When `vanishing-gradient` fires."""

    global_norm: float = between(1e-3, 0.0)
    """Global gradient norm below which the whole run is starved."""
    tensor_norm: float = between(1e-7, 0.0)
    """Gradient norm below which a tensor is starved, unless it is exactly 0."""
    start_steps: int = between(100, 0, counts="steps")
    """First steps, in which a tensor's gradient may be small as long as it grows."""
    growth: float = between(3.0, 1.0)
    """Multiple of its first value from which a gradient at its highest is growing."""
    share: float = between(1e-4, 0.0, 1.0)
    """The same as a fraction of the global norm, in a run that does not improve its loss: its size says nothing."""
    fallen: float = between(1e-4, 0.0, 1.0)
    """Fraction of its highest norm to which the gradient of a tensor must have fallen there."""


def _starved_for_its_loss(settings: VanishingGradient, _info: RunInfo) -> Gate:
    def is_starved(_step: int, norm: float, history: History) -> bool:
        if norm >= settings.global_norm:
            return False
        loss = history.newest("train/loss").last
        return not norm >= settings.global_norm * _shrunk_with(abs(loss[0]) if loss else math.nan)

    return is_starved


def _shrunk_with(loss: float) -> float:
    """The share of a limit that is left at this loss: a small loss has small gradients."""
    return loss if loss < 1 else 1.0


@rule(
    "G103", "vanishing-gradient",
    reads=("gradient/global_norm", "gradient/norm", "train/loss", "update/separate_losses"),
    when=("gradient/global_norm", "gradient/norm"), per_scope=True, hold=3, keep=100,
    gate=_starved_for_its_loss,
    lookahead=lambda settings, _info: Outside(low=settings.global_norm).lookahead,
    explains=("U103", "W104", "W106"),
    settings=VanishingGradient,
    message=(
        Message(
            "The gradient of {scope} has vanished, and others have not",
            "gradient norm {value} · limit {bound} · highest {highest}",
            "what follows it has saturated, such as the softmax of a policy that has become certain of one action",
        ),
        Message(
            "Gradients are vanishing in {scope}",
            "gradient norm {value} · expected at least {bound} · loss {loss}",
        ),
        Message("Gradients are vanishing", "gradient norm {value} · expected at least {bound} · loss {loss}"),
    ),
    remedies=(
        for_cause("start", advise(
            "check_loss_scale", "Check that the loss is not averaged or scaled down too far, and compute in float32",
            "almost no gradient reached the model from the very first step on, and in half precision it underflows",
        )),
        advise("inspect_layer", "Check the activations and initialization of {scope}",
               "a saturated activation, a missing residual connection or weights that start too small stop the "
               "gradient", scope_is="parameter"),
        for_cause("saturated", lower_lr(0.1, "large steps drive a softmax or a tanh to where it has no gradient")),
        for_cause("saturated", advise(
            "keep_exploring", "In reinforcement learning, add an entropy bonus to the loss",
            "a policy that has stopped trying other actions gets no gradient for them",
        )),
        for_cause("start", raise_lr(3.0, "the small gradient then moves the weights further")),
        for_cause("small", raise_lr(3.0, "the small gradient then moves the weights further")),
        advise("check_loss_scale", "Check that the loss is not averaged or scaled down too far",
               "the gradient shrinks with the loss"),
    ),
)  # fmt: skip
def vanishing_gradient(
    norm: Panel, tensors: Panel, loss: Panel, separate: Panel, settings: VanishingGradient, info: RunInfo
) -> Iterator[Finding]:
    """Gradients are too small to move anything, in the whole run or in one tensor.

    ## Why is this bad?
    Layers without gradient do not learn, and the layers above them learn from features that stay random. Anything below
    about 1e-7 is also lost in half precision.

    A small loss has small gradients. Below a loss of 1 the limits shrink with it, so a model that has learned its task
    is quiet. Biases and other vectors are not judged, because some have no gradient by construction. Several small
    matrices in a row start with almost no gradient, which then doubles with every step: a tensor whose gradient grows
    is not judged during the first steps.

    If the loss is not the objective, as in reinforcement learning, a small loss is no success. There a gradient that
    has vanished beside others that have not shows an output that is stuck at its limits.

    ## Example
    fires: 1e-4x5 | train/loss 2.0x5
    fires: gradient/norm{layer.weight} 1e-9x3
    quiet: gradient/norm{layer.weight} 4e-10 2e-9 7e-9 1.3e-8 4e-8 7e-8
    fires: 0.01x6 | gradient/norm{actor.weight} 0.1x3 1e-8x3 | train/loss 1e-4x6 | update/separate_losses 2x6
    quiet: gradient/norm{layer.bias} 1e-9x3
    quiet: 1e-4x5 | train/loss 0.001x5
    """
    now = max(norm.at, tensors.at)
    level = abs(loss.series().last)
    scale = _shrunk_with(level)
    whole, least = norm.series(), scale * settings.global_norm
    if whole.at == now and whole.last < least:
        at_start = whole.steps[0] == 0 and whole.values[0] < least
        yield finding(Severity.WARNING, whole.last, least, loss=level, cause="start" if at_start else "small")
    if tensors.at == now:
        least = scale * settings.tensor_norm
        saturated = _saturated(whole, tensors, loss.series(), separate.series(), settings, info)
        small = (tensors.last > 0) & (tensors.last < least)
        if small.any() and now < settings.start_steps:
            highest, first = tensors.values.max(axis=0), tensors.values[0]
            small &= ~((tensors.last >= highest) & (tensors.last / settings.growth >= first))
        for index in matrices(small | saturated, tensors.scopes, info):
            scope, value = tensors.scopes[index], tensors.last[index]
            if saturated[index]:
                highest = float(np.nanmax(tensors.values[:, index]))
                bound = min(settings.tensor_norm, settings.share * whole.last)
                yield finding(Severity.WARNING, value, bound, scope, highest=highest, cause="saturated")
            else:
                yield finding(Severity.WARNING, value, least, scope, loss=level, cause="small")


def _saturated(
    whole: Series, tensors: Panel, loss: Series, separate: Series, settings: VanishingGradient, info: RunInfo
) -> NDArray[np.bool_]:
    """Which gradients have vanished beside others that have not, in a run that does not improve its loss."""
    bound = min(settings.tensor_norm, settings.share * whole.last)
    vanished = (tensors.last > 0) & (tensors.last < bound)
    if whole.at != tensors.at or not vanished.any() or is_objective(loss, separate, info):
        return np.zeros(len(vanished), bool)
    vanished &= tensors.last < settings.fallen * np.fmax.reduce(tensors.values, axis=0)
    return vanished


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientSpike(Spike):
    """When `gradient-spike` fires."""

    floor: float = between(math.log(2.0), 0.0)
    lasting_steps: int = between(3, 1, counts="steps")
    """Number of steps in a row that make a spike a warning, if the loss rises; a single one is information."""
    warning_factor: float = between(10.0, 1.0)
    """Multiple of the recent level at which one step is a warning after clipping; before it, this squared."""
    loss_spread: float = between(5.0, 0.0)
    """Robust standard deviations by which the loss of a single step must exceed its level for a tall spike to count."""
    loss_rise: float = between(1.0, 0.0)
    """Rise of the loss of that step above its level, as a fraction of it, for a tall spike to count."""
    learning: float = between(0.1, 0.0, 1.0)
    """Fraction by which the loss must have fallen for larger gradients to be a sign of learning, or risen for lasting
    ones to matter."""
    negligible_share: float = between(0.2, 0.0, 1.0)
    """Fraction of the highest loss below which a spike is information: a solved task jumps by large factors."""


@rule(
    "G104", "gradient-spike",
    reads=("gradient/global_norm", "train/loss", "train/loss_level", "train/clip", "update/separate_losses"),
    when=("gradient/global_norm",), keep=20,
    gate=lambda settings, _info: lambda _step, _norm, history: (
        history.baseline("gradient/global_norm", settings).lasting > 0
    ),
    lookahead=lambda settings, _info: lambda metric, upcoming: upcoming.outliers(metric, settings),
    explains=("L102", "L107", "L108", "E107", "G102", "U102", "U104"),
    settings=GradientSpike,
    message=Message(
        "The gradient norm is {ratio:×} its usual level",
        "gradient norm before clipping {value} · limit {bound} · usual {level}",
    ),
    remedies=(
        clip_gradient(),
        skip_batch(),
        lower_beta2(),
        lower_lr(0.7),
        advise("inspect_batch", "Look at the batch of step {step}",
               "an unusual batch, or a single wrong label in it, has an unusual gradient"),
    ),
)  # fmt: skip
def gradient_spike(
    norm: Series, loss: Series, levels: Series, clip: Series, separate: Series, settings: GradientSpike, info: RunInfo
) -> Finding | None:
    """The global gradient norm, before clipping, is far above its recent level.

    ## Why is this bad?
    A gradient spike comes one or more steps before a loss spike and is the last chance to skip the batch. Several in a
    row, or a tall one, mean that the run is at the edge of stability.

    Five kinds are information only. The first is a single spike below ten times the level, or below a hundred times if
    clipping cuts it to less than ten. Heavy tails are normal, and clipping deals with them. The second is a single
    spike below a hundred times the level whose loss has not doubled. The third comes when the loss has just
    begun to fall by 10% or more, as when a model leaves a plateau. Larger gradients are part of learning. The fourth
    comes on an almost solved task, where a single sample can make a tiny gradient many times larger. The fifth comes
    where the loss is not the objective, as in a GAN: gradients follow the other side there.

    ## Example
    fires: 1.0+0.001x100 30.0
    fires: 1.0+0.001x100 30.0 | train/loss 2.0x50 2.1x50 4.5
    fires: 1.0+0.001x100 3.0x3
    quiet: 1.0+0.001x100 1.5
    """
    deviation = norm.deviation(settings)
    if not deviation.outlier:
        return None
    ratio, lasting = deviation.ratio, norm.steps_of(deviation.lasting)
    clipped_ratio = min(ratio, clip.last / deviation.level) if clip.at == norm.at else ratio
    extreme = ratio > settings.warning_factor**2
    tall = extreme or (clipped_ratio > settings.warning_factor and _stands_out(loss, norm.at, settings))
    before, now = loss.median(settings.window // 2, skip=settings.minimum // 4), loss.median(settings.minimum // 4)
    falls = now < before - settings.learning * abs(before)
    severe = tall or (lasting >= settings.lasting_steps and not now <= before + settings.learning * abs(before))
    highest = max(loss.finite().max(initial=0.0), levels.finite().max(initial=0.0))
    solved = loss.finite().min(initial=0.0) >= 0 and loss.last < settings.negligible_share * highest
    harmless = falls or solved or not is_objective(loss, separate, info)
    severity = Severity.WARNING if severe and not harmless else Severity.INFO
    return finding(
        severity, deviation.value, deviation.bound, level=deviation.level, ratio=ratio, lasting_steps=lasting
    )


def _stands_out(loss: Series, step: int, settings: GradientSpike) -> bool:
    """Whether the loss of this step is far above the recent ones and their spread; True if unknown."""
    if loss.at != step or not math.isfinite(loss.last):
        return True
    earlier = loss.finite(settings.window + 1)[:-1]
    if len(earlier) < settings.minimum:
        return True
    level = median(earlier)
    spread = MAD_TO_STD * median(np.abs(earlier - level))
    return bool(loss.last > level + max(settings.loss_spread * spread, settings.loss_rise * abs(level)))


@dataclass(frozen=True, slots=True, kw_only=True)
class MissingGradient(Settings):
    """When `missing-gradient` fires."""

    unused_share: float = between(0.2, 0.0, 1.0)
    """Fraction of all weights that must be in layers that are never called for them to be a warning."""


@rule(
    "G108", "missing-gradient", reads=("gradient/missing", "activation/mean"), when=("gradient/missing",),
    per_scope=True, hold=3, keep=100,
    explains=("L104", "L105", "U101", "E102", "E103", "E105", "E106"),
    settings=MissingGradient,
    message=(
        Message("The loss does not use {layer}", "", "{reason}, so {scope} is not trained"),
        Message(
            "{scope} receives no gradient",
            "",
            "the backward pass does not reach it: its `.grad` is None",
        ),
    ),
    remedies=(
        advise("check_graph", "Check that the loss depends on {scope}",
               "a `detach()`, a `no_grad()` block, `.item()`, numpy or a layer that `forward` never calls cuts it off",
               scope_is="parameter"),
        advise("freeze_on_purpose", "If this is intended, freeze {scope} before the run",
               "a parameter with `requires_grad=False` from the start is not reported", scope_is="parameter"),
    ),
)  # fmt: skip
def missing_gradient(missing: Panel, outputs: Panel, settings: MissingGradient, info: RunInfo) -> Iterator[Finding]:
    """The backward pass never reaches a trainable parameter.

    ## Why is this bad?
    The optimizer holds the parameter, but its gradient is None. It stays at its initial value, and the rest of the
    model trains around a random layer. Under DDP the run also waits for this gradient.

    It is reported after three checks in a row without a gradient. Some parameters are
    used only now and then, such as an expert without tokens. Such a gap is reported once it is too long for chance,
    judged by earlier gaps of the parameter and its siblings. A parameter without elements is never reported.

    Two kinds are information only. Many models define layers that one of their modes never calls; if they hold a fifth
    of all weights, it is a warning. Or the loss does not use the output of a small head, such as a pooler or the head
    of another task, while the layers before it learn.

    ## Example
    fires: gradient/missing{layer.weight} 1x3
    fires: gradient/missing{a.weight} 0x3 | gradient/missing{b.weight} 1x3 | activation/mean{a} 0.1x3
    fires: gradient/missing{experts.0.weight} 0 1 0 1x52
    quiet: gradient/missing{experts.0.weight} 0 1 0 1x9
    quiet: gradient/missing{experts.0.weight} 1x9 | gradient/missing{experts.1.weight} 1 0x8
    quiet: gradient/missing{layer.weight} 1x2 0 1x2 0
    """
    without = np.flatnonzero(idle_too_long(missing.values > 0, missing.scopes))
    unused = never_called(outputs, info) if len(without) and outputs.at == missing.at else set()
    sizes = num_elements(missing.scopes, info)
    unused_size = sum(sizes[index] for index in without if missing.scopes[index] in unused)
    aside: set[str] = set()
    if len(without) and outputs.at in (missing.at, -1):
        aside = side_outputs(missing.scopes, missing.last > 0, missing.last == 0, outputs, info)
    for index in without:
        scope = missing.scopes[index]
        parameter = info.parameters.get(scope)
        if parameter is not None and 0 in parameter.shape:
            continue
        if scope in aside:
            reason = "its output does not reach the loss"
            layer = layer_of(scope) if len(outputs) else scope
            yield finding(Severity.INFO, missing.last[index], 0.0, scope, layer=layer, reason=reason)
            continue
        if scope not in unused:
            yield finding(Severity.WARNING, missing.last[index], 0.0, scope)
            continue
        severity = Severity.WARNING if unused_size >= settings.unused_share * sizes.sum() else Severity.INFO
        reason = "the forward pass never calls it"
        yield finding(severity, missing.last[index], 0.0, scope, layer=layer_of(scope), reason=reason)


@rule(
    "G109", "accumulating-gradient", reads=("gradient/residual_norm", "gradient/global_norm"), hold=3, keep=100,
    explains=(
        "L101", "L102", "L103", "L104", "L106", "L107", "L108", "E107", "G102", "G104", "G106", "G107", "G110", "G111",
        "U102", "U104", "U115", "W102", "W104", "A101", "A102", "A103", "A104", "A106", "A107", "A108", "E102", "E103",
        "E104",
    ),
    message=Message(
        "Gradients pile up: `zero_grad()` is missing",
        "leftover gradient norm {value} · expected {bound} · gradient norm {global_norm}",
        "the next backward pass starts with the gradients of earlier steps",
    ),
    remedies=(
        advise("call_zero_grad", "Call `optimizer.zero_grad()` after each `optimizer.step()`",
               "the backward pass adds to the gradients that are already there"),
        advise("scale_loss", "If accumulation is intended, step only after the last batch",
               "to keep the scale, also divide the loss by the number of batches"),
    ),
)  # fmt: skip
def accumulating_gradient(residual: Series, norm: Series) -> Finding | None:
    """Gradients of earlier steps are still there when the next backward pass begins.

    ## Why is this bad?
    `backward()` adds to the gradients that are already there. Without `zero_grad()`, every step follows the sum of all
    batches so far. The norm grows from step to step, and the direction is out of date. The loss falls at first and then
    diverges. Accumulating over several batches before one optimizer step is fine and does not fire.

    ## Example
    fires: 1.0+1.0x4
    quiet: 0x10
    """
    if not residual.last > 0:
        return None
    return finding(Severity.WARNING, residual.last, 0.0, global_norm=norm.last)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipTooTight(Settings):
    """When `clip-too-tight` fires."""

    kept: float = between(0.01, 0.0, 1.0)
    """Fraction of its norm that a gradient keeps, below which almost all of it is lost."""
    often: float = between(0.9, 0.0, 1.0)
    """Fraction of the recent steps on which that must happen."""
    readings: int = between(64, 8, counts="readings")
    """Number of recent steps."""
    learning: float = between(0.5, 0.0, 1.0)
    """Fall of the loss, as a fraction of the first loss, from which it is information only."""
    epsilons: float = between(100.0, 0.0)
    """Multiple of the optimizer's epsilon below which clipped gradients are too small for Adam and its kin."""


@rule(
    "G112", "clip-too-tight", reads=("train/loss_level", "gradient/global_norm", "train/clip", "weight/global_norm"),
    when=("train/loss_level",), keep=128,
    explains=(
        "L104", "L105", "G103", "G105", "G106", "U101", "U103", "W104", "W106", "A104", "E102", "E103", "E105", "E106",
    ),
    settings=ClipTooTight,
    message=Message(
        "Clipping removes almost all of every gradient",
        "kept {value:%} of the norm · limit {bound:%} · clipped to {clip} · usual norm {usual}",
    ),
    remedies=(
        raise_clip(),
        raise_lr(10.0, "if the limit is meant, the steps are too small for it"),
    ),
)  # fmt: skip
def clip_too_tight(
    levels: Series, norm: Series, clip: Series, weight: Series, settings: ClipTooTight, info: RunInfo
) -> Finding | None:
    """Clipping cuts almost every gradient down to a small part of its norm.

    ## Why is this bad?
    With plain SGD the step is as small as the clipped gradient, and the run crawls. Clipping is meant for outliers: a
    limit near the usual norm. Adam and its kin divide the gradient by its size, so a tight limit alone does no harm.
    There it is information, unless the clipped gradients come close to the epsilon of the optimizer, or weight decay
    that is part of the gradient outweighs them. It is information too if the loss has halved all the same.

    ## Example
    fires: 2.3 _x62 2.3 | gradient/global_norm 5.0x64 | train/clip 0.0001x64
    quiet: 2.3 _x62 2.3 | gradient/global_norm 5.0x64 | train/clip 1.0x64
    """
    recent = norm.values[-settings.readings :]
    if len(recent) < settings.readings or clip.at != norm.at or not clip.last > 0 or math.isnan(levels.last):
        return None
    tight = recent * np.float32(settings.kept) > clip.last
    if not tight.mean() >= settings.often:
        return None
    usual = median(recent)
    epsilon = max((group.get("eps", 0.0) for group in info.groups), default=0.0)
    near_epsilon = clip.last < settings.epsilons * epsilon * math.sqrt(max(1, info.num_parameters))
    losses = levels.finite()
    fall = (losses[0] - losses[-1]) / abs(losses[0]) if len(losses) > 1 and losses[0] else 0.0
    plain = steps_grow_with_gradients(info) or not info.optimizers
    decay = 0.0 if decays_apart(info) else max((group.get("weight_decay", 0.0) for group in info.groups), default=0.0)
    outweighed = clip.last < decay * weight.last
    harms = fall < settings.learning and (plain or near_epsilon or outweighed)
    severity = Severity.WARNING if harms else Severity.INFO
    return finding(
        severity, clip.last / usual, settings.kept, clip=clip.last, usual=usual, lasting_steps=_clipped_for(norm, clip)
    )  # fmt: skip


_SAME_LIMIT = 0.05
"""Largest difference of two clipping norms that are the same, as a fraction: some are told from rounded norms."""


def _clipped_for(norm: Series, clip: Series) -> int:
    """Number of steps with this limit; all in memory if no other was seen: it takes two measured steps to see one."""
    others = clip.steps[~np.isclose(clip.values, clip.last, rtol=_SAME_LIMIT)]
    return norm.at - int(others[-1] + 1 if len(others) else norm.steps[0]) + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientChangedBeforeStep(Settings):
    """When `gradient-changed-before-step` fires."""

    norm: float = between(100.0, 0.0)
    """Gradient norm at the optimizer step above which a change matters."""
    factor: float = between(10.0, 1.0)
    """Largest allowed ratio of that norm to the norm after the backward pass."""
    steady: float = between(1e-3, 0.0)
    """Largest change of that ratio between checks, as a fraction, at which it is a constant factor."""
    evenness: float = between(1.2, 1.0)
    """Largest ratio between the standard deviations of two tensors at which their gradients are noise or signs."""
    elements: int = between(256, 1)
    """Minimum size of a tensor whose standard deviation counts: that of smaller ones varies by chance."""


_HOLD = 3
"""Number of checks in a row that show a change of the gradients."""


@rule(
    "G113", "gradient-changed-before-step",
    reads=(
        "gradient/norm", "gradient/global_norm", "gradient/global_norm_clipped", "gradient/std", "gradient/mean",
        "gradient/backward_passes",
    ),
    per_scope=True, hold=_HOLD, keep=100,
    explains=(
        "L101", "L102", "L103", "L104", "L105", "G108", "U101", "U102", "U103", "U104", "W101", "W102", "W104", "A103",
    ),
    settings=GradientChangedBeforeStep,
    message=(
        Message(
            "Gradients grow {ratio:×} between `backward()` and the optimizer step",
            "gradient norm at the step {value} · limit {bound} · after the backward pass {before}",
        ),
        Message(
            "Gradients are gone when the optimizer steps",
            "gradient norm at the step {value} · after the backward pass {before}",
        ),
    ),
    remedies=(
        for_cause("removed", advise(
            "move_zero_grad", "Call `optimizer.zero_grad()` before `loss.backward()` or after `optimizer.step()`",
            "between the two it deletes the gradients that the step needs",
        )),
        for_cause("grown", advise(
            "remove_scaling", "Find out what changes `.grad` between `loss.backward()` and `optimizer.step()`",
            "it may be a hook, clipping that uses its factor the wrong way round, or a factor for the batch, the ranks "
            "or the loss scale that is applied twice",
        )),
        for_cause("grown", advise(
            "clip_last", "Clip gradients as the last thing before `optimizer.step()`",
            "clipping does not limit what is done to the gradients after it",
        )),
    ),
)  # fmt: skip
def gradient_changed_before_step(
    tensors: Panel, norm: Panel, used: Panel, spread: Panel, means: Panel, passes: Panel,
    settings: GradientChangedBeforeStep, info: RunInfo,
) -> Finding | None:  # fmt: skip
    """The optimizer uses much larger gradients than the backward pass left, or none at all.

    ## Why is this bad?
    Something between `backward()` and `step()` writes to `.grad`. If it multiplies the gradients, SGD takes steps that
    many times too large, and clipping that came before it no longer limits anything. Adam hides a constant factor, but
    not its weight decay, and not a change of the factor. If it removes them, as a `zero_grad()` in the wrong place
    does, nothing is learned.

    Smaller gradients are normal: clipping, unscaling and averaging all make them so. Gradients that were replaced by
    noise or by their signs have the same spread in all tensors and do not fire either.

    ## Example
    fires: gradient/norm{layer.weight} 1900x3 | gradient/global_norm 0.95x3
    fires: gradient/norm{layer.weight} 0x3 | gradient/global_norm 0.95x3 | gradient/global_norm_clipped 0x3
    quiet: gradient/norm{layer.weight} 1.0x3 | gradient/global_norm 1900x3 | gradient/global_norm_clipped 1.0x3
    quiet: gradient/norm{layer.weight} 90x3 | gradient/global_norm 0.95x3
    quiet: gradient/norm{a} 150x3 | gradient/global_norm 0.9 0.8 0.7 | gradient/std{a} 1x3 | gradient/mean{a} 0x3
    """
    before = norm.series().last
    if norm.at != tensors.at or not 0 < before < math.inf:
        return None
    if used.at == tensors.at and used.series().last == 0:
        return finding(Severity.WARNING, 0.0, 0.0, before=before, cause="removed")
    squares = np.square(tensors.last, dtype=np.float64)
    at_step = math.sqrt(np.add.reduce(np.where(np.isnan(squares), 0.0, squares)))
    bound = max(settings.norm, settings.factor * before)
    if not bound < at_step < math.inf:
        return None
    if not _is_constant_factor(tensors, norm, settings.steady):
        if passes.at == tensors.at and passes.series().last > 1:
            return None  # the gradients of several losses may be combined by hand
        if _is_noise(spread, means, settings, info):
            return None
    return finding(Severity.WARNING, at_step, bound, before=before, ratio=at_step / before, cause="grown")


def _is_constant_factor(tensors: Panel, norm: Panel, tolerance: float) -> bool:
    """Whether the last checks found the same ratio between the gradients that were used and those after backward."""
    recent = slice(-_HOLD, None)
    before = dict(zip(norm.steps.tolist(), norm.series().values.tolist(), strict=True))
    after = np.sqrt(np.nansum(np.square(tensors.values[recent], dtype=np.float64), axis=1))
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = after / np.array([before.get(step, math.nan) for step in tensors.steps[recent].tolist()])
    return bool(len(ratios) == _HOLD and ratios.max() <= (1 + tolerance) * ratios.min())


def _is_noise(spread: Panel, means: Panel, settings: GradientChangedBeforeStep, info: RunInfo) -> bool:
    """Whether the values of all large tensors spread equally far around zero, as those of noise or signs do."""
    sizes = {scope: math.prod(parameter.shape) for scope, parameter in info.parameters.items()}
    large = [index for index, scope in enumerate(spread.scopes) if sizes.get(scope, math.inf) >= settings.elements]
    stds, offsets = spread.last[large], means.last[large] if means.scopes == spread.scopes else np.empty(0)
    if not len(stds) or len(offsets) != len(stds) or np.isnan(stds).any():
        return False
    return bool(stds.max() <= settings.evenness * stds.min() and (np.abs(offsets) < stds).all())


@dataclass(frozen=True, kw_only=True)
class GradientThresholds(Settings):
    """The settings of the rules in this file, by the name of the rule."""

    exploding_gradient: ExplodingGradient = ExplodingGradient()
    vanishing_gradient: VanishingGradient = VanishingGradient()
    gradient_spike: GradientSpike = GradientSpike()
    missing_gradient: MissingGradient = MissingGradient()
    clip_too_tight: ClipTooTight = ClipTooTight()
    gradient_changed_before_step: GradientChangedBeforeStep = GradientChangedBeforeStep()
