"""Rules about weights that do not move and optimizers that do not step."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from forewarn.judge.headlines import Message
from forewarn.judge.intermittence import idle_too_long
from forewarn.judge.registry import NO_BOUND, Outside, finding, rule
from forewarn.judge.remedies import (
    add_to_optimizer,
    advise,
    for_cause,
    keep_in_float32,
    raise_lr,
)
from forewarn.judge.rules.loss import is_solved
from forewarn.judge.series import Panel, Series, trailing
from forewarn.judge.tensor_kinds import (
    copies,
    idle_copies,
    is_matrix,
    layer_of,
    never_called,
    num_elements,
    side_outputs,
)
from forewarn.settings import Settings, between
from forewarn.types import Finding, FrozenCause, RunInfo, Severity, Values

_FROZEN = tuple(float(cause) for cause in FrozenCause if cause not in (FrozenCause.MOVING, FrozenCause.ON_PURPOSE))
_WITHOUT_GRADIENT = (FrozenCause.ZERO_GRADIENT, FrozenCause.ROUNDED_AWAY)
"""Causes that affect every weight once the loss is almost zero."""
_IDLE = (float(FrozenCause.NO_GRADIENT), float(FrozenCause.ZERO_GRADIENT))
"""Causes that stop a weight while no input reaches it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenWeight(Settings):
    """When `frozen-weight` fires."""

    ratio: float = between(1e-12, 0.0)
    """Update/weight ratio at or below which a weight does not move."""
    patience: int = between(3, 1, counts="readings")
    """Number of checks in a row at or below that ratio that make a weight frozen."""
    negligible_share: float = between(1e-6, 0.0, 1.0)
    """Fraction of the highest loss below which a vanished gradient is information only: the task is solved."""


@rule(
    "U101", "frozen-weight",
    reads=("update/frozen_cause", "update/ratio", "train/loss", "train/loss_level", "activation/mean"),
    when=("update/frozen_cause",), per_scope=True, keep=100,
    settings=FrozenWeight,
    message=Message(
        "{scope} does not move", "update/weight ratio {value} · expected above {bound}", "{cause:words}"
    ),
    remedies=(
        for_cause(FrozenCause.NOT_IN_OPTIMIZER, add_to_optimizer()),
        for_cause(FrozenCause.REQUIRES_GRAD_OFF, advise(
            "set_requires_grad", "Call `requires_grad_(True)` on {scope}",
            "its `requires_grad` was turned off during the run", scope_is="parameter",
        )),
        for_cause(FrozenCause.NO_GRADIENT, advise(
            "check_graph", "Check that the loss depends on {scope}",
            "a `detach()`, a `no_grad()` block or a layer that is never called cuts it off", scope_is="parameter",
        )),
        for_cause(FrozenCause.ZERO_GRADIENT, advise(
            "inspect_layer", "Find out what multiplies the output of {scope} by zero",
            "dead units, a mask over everything or a closed gate stop the gradient", scope_is="parameter",
        )),
        for_cause(FrozenCause.ZERO_LR, raise_lr(10.0, "nothing moves at a learning rate of 0")),
        for_cause(FrozenCause.OPTIMIZER_NOT_STEPPED, advise(
            "call_optimizer_step", "Call `optimizer.step()` after `loss.backward()`",
            "the backward pass alone changes no weight",
        )),
        for_cause(FrozenCause.STEP_SKIPPED, advise(
            "lower_loss_scale", "Lower the initial loss scale of the gradient scaler",
            "the scaler found overflows and skipped these steps; a few are normal while it finds its scale",
        )),
        for_cause(FrozenCause.ROUNDED_AWAY, keep_in_float32()),
        for_cause(FrozenCause.ROUNDED_AWAY, raise_lr(
            10.0, "an update must be larger than the rounding error of the weight"
        )),
        advise("freeze_on_purpose", "If this is intended, freeze {scope} before the run",
               "a parameter with `requires_grad=False` from the start is not reported", scope_is="parameter"),
    ),
)  # fmt: skip
def frozen_weight(
    causes: Panel, ratios: Panel, loss: Panel, levels: Panel, outputs: Panel, settings: FrozenWeight, info: RunInfo
) -> Iterator[Finding]:
    """A trainable weight does not move.

    ## Why is this bad?
    The weight stays at its initial value while the rest of the model trains around it. Nothing fails and the loss even
    falls, only less far. The evidence names the cause. The weight may be in no optimizer group, or its `requires_grad`
    turned off. It may have no gradient, or one of exactly zero. The learning rate may be 0, the optimizer may not step,
    or the gradient scaler may skip its steps. Or low precision rounds the update away.

    Weights frozen before the run began are intended and not reported. Nor are those whose gradients the loop sets to
    None after the backward pass while it keeps others, as where a layer is frozen for an epoch. A weight that is used
    only now and then, such as that of an expert without tokens, is reported once it has rested for longer than chance
    explains. When the loss is almost zero, a gradient that is zero or rounded away is information only: nothing is left
    to learn. So is a vector alone without a gradient, while the matrix of its layer learns: some cancel in the loss by
    construction, such as the last bias of a WGAN critic or a bias before a normalization. A layer that the forward pass
    never calls is left to `missing-gradient`, and so is a small head whose output the loss does not use.

    ## Example
    fires: update/frozen_cause{layer.weight} 0x3 5
    quiet: update/frozen_cause{layer.weight} 0x4 | update/frozen_cause{embedding.weight} 1x4
    """
    frozen = np.flatnonzero(np.isin(causes.last, _FROZEN)) if (causes.last > FrozenCause.ON_PURPOSE.value).any() else ()
    if not len(frozen):
        return
    ratio_of = dict(zip(ratios.scopes, ratios.last, strict=True)) if ratios.at == causes.at else {}
    solved = is_solved(loss, levels, settings.negligible_share)
    now_and_then = resting(causes.last, causes.scopes, ratios, settings) if ratio_of else set()
    is_a_matrix = is_matrix(causes.scopes, info)
    learning = {layer_of(causes.scopes[index]) for index in np.flatnonzero(is_a_matrix & (causes.last == 0))}
    unused: set[str] = set()
    meant = idle_copies(causes, info)
    if outputs.at in (causes.at, -1):
        stopped, moving = (causes.last == float(cause) for cause in (FrozenCause.NO_GRADIENT, FrozenCause.MOVING))
        unused = never_called(outputs, info) | side_outputs(causes.scopes, stopped, moving, outputs, info)
    for index in frozen:
        cause, scope = FrozenCause(int(causes.last[index])), causes.scopes[index]
        if scope in now_and_then or (cause is FrozenCause.NOT_IN_OPTIMIZER and scope in meant):
            continue
        if cause is FrozenCause.NO_GRADIENT and scope in unused:
            continue
        cancels = cause in _WITHOUT_GRADIENT and not is_a_matrix[index] and layer_of(scope) in learning
        harmless = cause is FrozenCause.STEP_SKIPPED or cancels or (solved and cause in _WITHOUT_GRADIENT)
        severity = Severity.INFO if harmless else Severity.WARNING
        ratio = float(ratio_of.get(scope, np.nan))
        still = _still_for(ratios, scope, settings) if ratio_of else {}
        yield finding(severity, ratio, settings.ratio, scope, cause=cause.name.lower(), **still)


def _still_for(ratios: Panel, scope: str, settings: FrozenWeight) -> dict[str, float]:
    """Number of steps since the weight last moved, if it ever did: checks are rare, and several in a row must agree."""
    if scope not in ratios.scopes:
        return {}
    moved = ratios.steps[ratios.values[:, ratios.scopes.index(scope)] > settings.ratio]
    return {"lasting_steps": ratios.at - int(moved[-1])} if len(moved) else {}


def resting(causes: Values, scopes: tuple[str, ...], ratios: Panel, settings: FrozenWeight) -> set[str]:
    """The tensors without a gradient that are used now and then and have not rested for too long."""
    idle = [scopes[index] for index in np.flatnonzero(np.isin(causes, _IDLE))]
    if not idle:
        return set()
    too_long = idle_too_long(ratios.values <= settings.ratio, ratios.scopes)
    return set(idle) & {scope for scope, is_over in zip(ratios.scopes, too_long, strict=True) if not is_over}


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerNotStepping(Settings):
    """When `optimizer-not-stepping` fires."""

    steps: int = between(3, 1, counts="readings")
    """Number of `monitor.step()` calls in a row without an optimizer step."""
    skipped_steps: int = between(20, 1, counts="readings")
    """Number of steps in a row skipped by the gradient scaler; a few are normal while it finds its scale."""


@rule(
    "U105", "optimizer-not-stepping", reads=("update/optimizer_steps", "update/skipped", "train/loss_scale"), keep=20,
    gate=lambda _settings, _info: Outside(low=sys.float_info.min),
    explains=("L104", "L105", "U101", "E102", "E103", "E105", "E106"),
    settings=OptimizerNotStepping,
    message=(
        Message(
            "Every optimizer step is skipped",
            "steps skipped in a row {overflows} · limit {bound} · loss scale {loss_scale}",
        ),
        Message(
            "`optimizer.step()` is not being called",
            "calls of `monitor.step()` without it {value} · limit {bound}",
        ),
    ),
    remedies=(
        advise("call_optimizer_step", "Call `optimizer.step()` after `loss.backward()`",
               "the backward pass alone changes no weight"),
        advise("step_the_monitor_less", "Call `monitor.step()` once per `optimizer.step()`",
               "with gradient accumulation it belongs after the optimizer step, not after every batch"),
        advise("use_bfloat16", "If the gradient scaler skips every step, use bfloat16",
               "it has the range of float32 and needs no loss scale"),
    ),
)  # fmt: skip
def optimizer_not_stepping(
    steps: Series, skipped: Series, scale: Series, settings: OptimizerNotStepping
) -> Finding | None:
    """The training loop runs without optimizer steps.

    ## Why is this bad?
    Nothing is learned. Either `optimizer.step()` is missing or behind a condition that never holds, or a gradient
    scaler finds an overflow in every step and skips it. A few skips are normal while the scaler finds its scale. If the
    monitor is stepped for every batch of an accumulation, a gap no longer than an earlier one is not reported.

    ## Example
    fires: 1x5 0x3
    fires: 0x20 | update/skipped 1x20
    quiet: 1x5 0x2 1x5
    quiet: 0x8 1 | update/skipped 1x8 0
    """
    if not len(steps) or steps.last > 0:
        return None
    gaps = np.diff(np.flatnonzero(np.append(np.append(True, steps.values > 0), True))) - 1
    idle, longest = int(gaps[-1]), int(gaps[1:-1].max(initial=0))
    overflows = min(trailing(skipped.values > 0), idle) if skipped.at == steps.at else 0
    if overflows >= settings.skipped_steps:
        return finding(
            Severity.WARNING,
            idle,
            settings.skipped_steps,
            lasting_steps=idle,
            overflows=overflows,
            loss_scale=scale.last,
        )
    bound = max(settings.steps, longest + 1)
    if idle - overflows < bound:
        return None
    return finding(Severity.WARNING, idle, bound, lasting_steps=idle)


@rule(
    "U106", "parameter-not-in-optimizer", reads=("update/frozen_cause",), per_scope=True, keep=100,
    explains=("L104", "L105", "U101", "G109", "E102", "E103", "E105", "E106"),
    message=Message("{scope} is not in any optimizer", "", "it is trainable, but no parameter group contains it"),
    remedies=(
        add_to_optimizer(),
        advise("freeze_on_purpose", "If this is intended, freeze {scope} before the run",
               "a parameter with `requires_grad=False` from the start is not reported", scope_is="parameter"),
    ),
)  # fmt: skip
def parameter_not_in_optimizer(causes: Panel, info: RunInfo) -> Iterator[Finding]:
    """A trainable parameter is not in any optimizer group.

    ## Why is this bad?
    It gets gradients but never moves. It was added to the model after the optimizer was made, or left out by a filter
    over names. Or another tensor replaced it when the model was moved or tied. `optimizer.zero_grad()` does not clear
    its gradient either, so the gradient keeps growing. A copy of trained weights, such as a target network, is not
    reported: `stale-copy` is about those. It has the same values when the run begins.

    ## Example
    fires: update/frozen_cause{head.weight} 2
    quiet: update/frozen_cause{head.weight} 0 1 5
    """
    idle = idle_copies(causes, info)
    for index in np.flatnonzero(causes.last == float(FrozenCause.NOT_IN_OPTIMIZER)):
        if causes.scopes[index] not in idle:
            yield finding(Severity.WARNING, causes.last[index], NO_BOUND, causes.scopes[index])


@dataclass(frozen=True, slots=True, kw_only=True)
class MostlyFrozen(Settings):
    """When `mostly-frozen` fires."""

    share: float = between(0.5, 0.0, 1.0)
    """Fraction of all weights that must be frozen on purpose."""


@rule(
    "U114", "mostly-frozen", reads=("monitor/update_ratio_median", "update/frozen_cause"),
    when=("monitor/update_ratio_median",), per_scope=True, keep=1000,
    settings=MostlyFrozen,
    message=Message(
        "{value:%} of the model is frozen",
        "trained weights {num_trained} · all {num_weights} · frozen tensors {num_tensors}",
        "`requires_grad` was off before the run",
    ),
    remedies=(
        advise("unfreeze", "If this is not intended, call `model.requires_grad_(True)` before the optimizer is made",
               "a frozen weight keeps its initial value"),
    ),
)  # fmt: skip
def mostly_frozen(typical: Panel, causes: Panel, settings: MostlyFrozen, info: RunInfo) -> Finding | None:
    """Most of the model was frozen before the run.

    ## Why is this bad?
    It is information only: adapters and fine-tuned heads train a small part of a model on purpose. If the rest is
    frozen by mistake, it stays at its random start, nothing fails, and the loss falls less far.

    ## Example
    fires: 0.01 | update/frozen_cause{body.weight} 1 | update/frozen_cause{head.bias} 0
    quiet: 0.01 | update/frozen_cause{body.weight} 0 | update/frozen_cause{head.bias} 1
    """
    frozen = causes.last == FrozenCause.ON_PURPOSE.value
    if causes.at != typical.at or math.isnan(typical.series().last) or not frozen.any():
        return None
    sizes = num_elements(causes.scopes, info).copy()
    sizes[[scope in copies(info) for scope in causes.scopes]] = 0.0
    share = float(sizes[frozen].sum() / max(1.0, sizes.sum()))
    if not share >= settings.share:
        return None
    return finding(
        Severity.INFO, share, settings.share, num_tensors=int(np.count_nonzero(frozen & (sizes > 0))),
        num_trained=sizes[~frozen].sum(), num_weights=sizes.sum(),
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class FrozenThresholds(Settings):
    """The settings of the rules in this file, by the name of the rule."""

    frozen_weight: FrozenWeight = FrozenWeight()
    optimizer_not_stepping: OptimizerNotStepping = OptimizerNotStepping()
    mostly_frozen: MostlyFrozen = MostlyFrozen()
