"""Rules about the gradients."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from forewarn.judge.headlines import Message
from forewarn.judge.registry import finding, rule
from forewarn.judge.remedies import (
    advise,
    clip_gradient,
    lower_beta2,
    lower_lr,
    raise_lr,
    roll_back,
    skip_batch,
    snapshot,
    warm_up,
)
from forewarn.judge.series import Panel, Series
from forewarn.judge.spike import Spike
from forewarn.judge.tensor_kinds import matrices
from forewarn.settings import Settings, between
from forewarn.types import Finding, RunInfo, Severity


@rule(
    "G101", "non-finite-gradient", reads=("gradient/global_norm", "gradient/nonfinite", "update/optimizer_steps"),
    when=("gradient/global_norm", "gradient/nonfinite"), per_scope=True, keep=50,
    explains=("L101", "W101", "A103", "M101"),
    message=(
        Message(
            "Gradients contain NaN or infinity",
            "gradient norm {value} · tensors affected {num_tensors} · nearest the output {nearest_the_output}",
        ),
        Message(
            "The gradient of {scope} contains NaN or infinity",
            "non-finite values {value} · tensors affected {num_tensors}",
        ),
        Message("Gradients contain NaN or infinity", "gradient norm {value}"),
    ),
    remedies=(
        skip_batch("a step with these gradients destroys the weights that they reach"),
        roll_back(),
        advise("find_operation", "Find operation", "torch.autograd.detect_anomaly() names the operation: look for sqrt, log, norm and "
               "division at zero", scope_is="parameter"),
        advise("raise_epsilon", "Raise epsilon", "a division by something near zero is the usual cause", to=1e-5),
        lower_lr(0.5, "if the gradients grew before they overflowed, the steps were too large"),
        snapshot(),
    ),
)  # fmt: skip
def non_finite_gradient(norm: Panel, nonfinite: Panel, steps: Panel, info: RunInfo) -> Iterator[Finding]:
    """Gradients that hold NaN or infinite values.

    ## Why is this bad?
    The optimizer step that follows writes them into the weights, and into its own moments, from where they never leave.
    With a finite loss the cause is in the backward pass: a square root, a logarithm or a norm at zero, a division by
    almost zero, an overflow in half precision. Steps that a gradient scaler skips for this are not counted, and where
    the optimizer was not stepped with them, by a loop that looks or a scaler that is not known yet, it is information.

    The backward pass goes from the output to the input, and what is not finite spreads along with it. So the cause is
    nearest to the last of the tensors named, in the order of the model: `nearest_the_output`.

    ## Example
    fires: 1.0x5 nan
    fires: 1.0x5 nan | gradient/nonfinite{layer.weight} 0x5 12
    fires: gradient/nonfinite{layer.weight} 0x5 12
    quiet: 1.0x5 1e30 | gradient/nonfinite{layer.weight} 0x6
    """
    now = max(norm.at, nonfinite.at)
    bad = np.flatnonzero(nonfinite.last > 0) if nonfinite.at == now else np.empty(0, np.intp)
    whole = Series(norm)
    left_out = steps.at == now and Series(steps).last == 0
    severity = Severity.INFO if left_out else Severity.CRITICAL
    evidence: dict[str, float] = {"optimizer_steps": 0} if left_out else {}
    if whole.at == now and len(whole) and not math.isfinite(whole.last):
        yield finding(severity, whole.last, 0.0, "", **_origin(nonfinite, bad, info), **evidence)
    for index in bad:
        yield finding(severity, nonfinite.last[index], 0.0, nonfinite.scopes[index], num_tensors=len(bad), **evidence)


def _origin(nonfinite: Panel, bad: NDArray[np.intp], info: RunInfo) -> dict[str, float | str]:
    """How many tensors are affected, and the one that the backward pass reached first."""
    if not len(bad):
        return {}
    order = {scope: place for place, scope in enumerate(info.parameters)}
    last = max((nonfinite.scopes[index] for index in bad), key=lambda scope: order.get(scope, -1))
    return {"num_tensors": len(bad), "nearest_the_output": last}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplodingGradient(Settings):
    """When `exploding-gradient` fires."""

    warning: float = between(100.0, 0.0)
    """Global gradient norm before clipping at which to warn."""
    critical: float = between(1000.0, 0.0)
    """Global gradient norm before clipping that is critical."""


@rule(
    "G102", "exploding-gradient", reads=("gradient/global_norm", "gradient/norm"), per_scope=True, keep=50,
    explains=("L101", "L102", "G101", "U102", "U104", "M102", "M103"),
    settings=ExplodingGradient,
    message=(
        Message(
            "Gradients are exploding",
            "gradient norm before clipping {value} · limit {bound} · largest {largest_norm} in {largest_tensor}",
        ),
        Message("Gradients are exploding", "gradient norm before clipping {value} · limit {bound}"),
    ),
    remedies=(clip_gradient(), lower_lr(0.5), warm_up(), advise(
        "inspect_batch", "Inspect batch", "a sum over a long or large batch in place of a mean scales the gradient with it"
    )),
)  # fmt: skip
def exploding_gradient(norm: Panel, tensors: Panel, settings: ExplodingGradient) -> Finding | None:
    """Global gradient norm, before clipping, that is very large.

    ## Why is this bad?
    Without clipping such a step throws the weights far away; with clipping it is almost all direction and no scale, and
    the largest tensor decides that direction alone. A healthy norm lies between 0.1 and 10 for most models with a mean
    loss; a loss that is a sum over the batch has larger norms by nature: raise the bounds then.

    ## Example
    fires: 1.0x20 150.0
    fires: 1.0x20 150.0 | gradient/norm{layer.weight} 0.5x20 140.0
    quiet: 1.0x20 90.0
    """
    whole = Series(norm)
    if not settings.warning < whole.last < math.inf:
        return None
    severity = Severity.CRITICAL if whole.last > settings.critical else Severity.WARNING
    bound = settings.critical if severity is Severity.CRITICAL else settings.warning
    evidence: dict[str, float | str] = {}
    if tensors.at == norm.at and not np.isnan(tensors.last).all():
        largest = int(np.nanargmax(tensors.last))
        evidence = {"largest_tensor": tensors.scopes[largest], "largest_norm": float(tensors.last[largest])}
    return finding(severity, whole.last, bound, "", **evidence)


@dataclass(frozen=True, slots=True, kw_only=True)
class VanishingGradient(Settings):
    """When `vanishing-gradient` fires."""

    global_norm: float = between(1e-3, 0.0)
    """Global gradient norm below which the run as a whole is starved."""
    tensor_norm: float = between(1e-7, 0.0)
    """Gradient norm of one tensor below which (and above 0) it is starved."""


@rule(
    "G103", "vanishing-gradient", reads=("gradient/global_norm", "gradient/norm", "train/loss"),
    when=("gradient/global_norm", "gradient/norm"), per_scope=True, hold=3, keep=100,
    explains=("U103",),
    settings=VanishingGradient,
    message=(
        Message("Gradients are vanishing in {scope}", "gradient norm {value} · expected at least {bound}"),
        Message("Gradients are vanishing", "gradient norm {value} · expected at least {bound}"),
    ),
    remedies=(
        advise("inspect_layer", "Inspect layer", "a saturated activation, a missing residual connection or an initialisation that is "
               "too small stops the gradient here", scope_is="parameter"),
        raise_lr(3.0, "what little gradient there is then moves the weights further"),
        advise("check_loss_scale", "Check loss scale", "a loss that is averaged or scaled down too far has gradients to match"),
    ),
)  # fmt: skip
def vanishing_gradient(
    norm: Panel, tensors: Panel, loss: Panel, settings: VanishingGradient, info: RunInfo
) -> Iterator[Finding]:
    """Gradient so small that it moves nothing, in the run as a whole or in one tensor.

    ## Why is this bad?
    Layers without gradient do not learn, and the layers above them learn from features that stay random. Whatever is
    below about 1e-7 is also lost in half precision.

    A gradient is small in proportion where the loss is small: below a loss of 1 the bounds shrink with it, so a model
    that has learned its task is quiet. Biases and other vectors are not judged, for some have no gradient by
    construction.

    ## Example
    fires: 1e-4x5 | train/loss 2.0x5
    fires: gradient/norm{layer.weight} 1e-9x3
    quiet: gradient/norm{layer.bias} 1e-9x3
    quiet: 1e-4x5 | train/loss 0.001x5
    """
    now = max(norm.at, tensors.at)
    level = abs(Series(loss).last)
    scale = level if level < 1 else 1.0
    whole, least = Series(norm), scale * settings.global_norm
    if whole.at == now and whole.last < least:
        yield finding(Severity.WARNING, whole.last, least, loss=level)
    if tensors.at == now:
        least = scale * settings.tensor_norm
        small = (tensors.last > 0) & (tensors.last < least)
        for index in matrices(small, tensors.scopes, info):
            yield finding(Severity.WARNING, tensors.last[index], least, tensors.scopes[index], loss=level)


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientSpike(Spike):
    """When `gradient-spike` fires."""

    floor: float = between(math.log(2.0), 0.0)
    lasting_steps: int = between(3, 1, counts="steps")
    """Steps in a row after which a spike is a warning; a single one is information."""
    warning_factor: float = between(10.0, 1.0)
    """Times the recent level, after clipping, at which a single step is a warning; before it, the square of this."""
    learning: float = between(0.1, 0.0, 1.0)
    """Share by which the loss must just have fallen for larger gradients to be those of a model that learns."""
    negligible_share: float = between(0.2, 0.0, 1.0)
    """Share of the highest loss so far below which a spike is information: a solved task jumps by large factors."""


@rule(
    "G104", "gradient-spike", reads=("gradient/global_norm", "train/loss", "train/loss_level", "train/clip"), keep=20,
    explains=("L102", "G102", "U102", "U104"),
    settings=GradientSpike,
    message=Message(
        "The gradient norm is {ratio}× its usual level",
        "gradient norm before clipping {value} · limit {bound} · usual {level}",
    ),
    remedies=(
        clip_gradient(),
        skip_batch(),
        lower_beta2(),
        lower_lr(0.7),
        advise("inspect_batch", "Inspect batch", "a batch unlike the others, or one wrong label in it, has a gradient of its own"),
    ),
)  # fmt: skip
def gradient_spike(norm: Series, loss: Series, levels: Series, clip: Series, settings: GradientSpike) -> Finding | None:
    """Global gradient norm, before clipping, far above its own recent level.

    ## Why is this bad?
    A gradient spike comes one or more steps before a loss spike, and is the last moment at which the batch can still be
    left out. A single one below ten times the level is information, as is one below a hundred times of which clipping
    leaves less than ten: heavy tails are usual, and clipping takes care of them. Several in a row, or a tall one, say
    that the run is near the edge of stability; but where the loss has just begun to fall by a tenth and more, as when a
    model leaves a plateau, larger gradients are what learning looks like. On a task that is all but solved one sample
    makes the gradient of a batch many times as large, at heights that do not matter: that is information.

    ## Example
    fires: 1.0+0.001x100 30.0
    fires: 1.0+0.001x100 3.0x3
    quiet: 1.0+0.001x100 1.5
    """
    deviation = norm.deviation(settings)
    if not deviation.outlier:
        return None
    ratio, lasting = deviation.ratio, norm.steps_of(deviation.lasting)
    clipped_ratio = min(ratio, clip.last / deviation.level) if clip.at == norm.at else ratio
    tall = clipped_ratio > settings.warning_factor or ratio > settings.warning_factor**2
    severe = tall or lasting >= settings.lasting_steps
    before, now = loss.median(settings.window // 2, skip=settings.minimum // 4), loss.median(settings.minimum // 4)
    falls = now < before - settings.learning * abs(before)
    highest = max(loss.finite().max(initial=0.0), levels.finite().max(initial=0.0))
    solved = loss.finite().min(initial=0.0) >= 0 and loss.last < settings.negligible_share * highest
    severity = Severity.WARNING if severe and not falls and not solved else Severity.INFO
    return finding(
        severity, deviation.value, deviation.bound, level=deviation.level, ratio=ratio, lasting_steps=lasting
    )


@rule(
    "G108", "missing-gradient", reads=("gradient/missing",), per_scope=True, hold=3, keep=100,
    explains=("U101",),
    message=Message(
        "{scope} never receives a gradient",
        "",
        "the backward pass does not reach it: its `.grad` is None",
    ),
    remedies=(
        advise("check_graph", "Check graph", "a detach(), a no_grad() block, .item() or numpy on the way to the loss cuts it off, and "
               "so does a layer that forward never calls", scope_is="parameter"),
        advise("freeze_on_purpose", "Freeze on purpose", "requires_grad_(False) before the run says that it is meant", scope_is="parameter"),
    ),
)  # fmt: skip
def missing_gradient(missing: Panel, info: RunInfo) -> Iterator[Finding]:
    """Trainable parameter that the backward pass never reaches.

    ## Why is this bad?
    The optimizer holds it, but its gradient is None: it stays at its initial value, and the rest of the model trains
    around a random layer. Under DDP the run also waits for this gradient. A parameter that is used now and then, such
    as an expert without tokens, must be missing at three checks in a row to be named; one without elements never is.

    ## Example
    fires: gradient/missing{layer.weight} 1x3
    quiet: gradient/missing{layer.weight} 1x2 0 1x2 0
    """
    for index in np.flatnonzero(missing.last > 0):
        parameter = info.parameters.get(missing.scopes[index])
        if parameter is None or 0 not in parameter.shape:
            yield finding(Severity.WARNING, missing.last[index], 0.0, missing.scopes[index])


@rule(
    "G109", "accumulating-gradient", reads=("gradient/residual_norm", "gradient/global_norm"), hold=3, keep=100,
    explains=("L101", "L102", "L103", "G102", "G104", "U102", "U104", "W102"),
    message=Message(
        "Gradients pile up: `zero_grad()` is missing",
        "gradient norm left from earlier steps {value} · gradient norm in all {global_norm}",
        "gradients of earlier steps are still there when the next backward pass begins",
    ),
    remedies=(
        advise("call_zero_grad", "Call zero grad", "it belongs after each optimizer.step(): backward() adds to what it finds"),
        advise("scale_loss", "Scale loss", "if the sum over several batches is meant, step the optimizer only after the last of them "
               "and divide the loss by their number"),
    ),
)  # fmt: skip
def accumulating_gradient(residual: Series, norm: Series) -> Finding | None:
    """Gradients of earlier steps that are still there when the next backward pass begins.

    ## Why is this bad?
    backward() adds to what it finds. Without zero_grad() every step follows the sum of all batches so far: the norm
    grows from step to step, the direction is that of the past, and the loss falls at first and then diverges.
    Accumulating over several batches before one optimizer step is fine and quiet.

    ## Example
    fires: 1.0+1.0x4
    quiet: 0x10
    """
    if not residual.last > 0:
        return None
    return finding(Severity.WARNING, residual.last, 0.0, global_norm=norm.last)


@dataclass(frozen=True, kw_only=True)
class GradientThresholds(Settings):
    """The settings of the rules in this file, by the name of the rule."""

    exploding_gradient: ExplodingGradient = ExplodingGradient()
    vanishing_gradient: VanishingGradient = VanishingGradient()
    gradient_spike: GradientSpike = GradientSpike()
