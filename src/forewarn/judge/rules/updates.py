"""Rules about what the optimizer does to the weights."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from forewarn.judge.lr_course import last_jump, newest_jump, peak_rate, planned_growth, rates
from forewarn.judge.registry import NO_BOUND, found, rule
from forewarn.judge.remedies import (
    add_to_optimizer,
    advise,
    clip_gradient,
    for_cause,
    keep_in_float32,
    lower_lr,
    raise_lr,
    restore_lr,
    roll_back,
    warm_up,
)
from forewarn.judge.rules.loss import is_solved
from forewarn.judge.series import Floats, Panel, Series, median
from forewarn.judge.tensor_kinds import is_matrix, matrices
from forewarn.thresholds.updates import (
    FrozenWeight,
    OptimizerNotStepping,
    UpdateRatioHigh,
    UpdateRatioJump,
    UpdateRatioLow,
)
from forewarn.types import Finding, FrozenCause, RunInfo, Severity

_FROZEN = tuple(float(cause) for cause in FrozenCause if cause not in (FrozenCause.MOVING, FrozenCause.ON_PURPOSE))
_WITHOUT_GRADIENT = (FrozenCause.ZERO_GRADIENT, FrozenCause.ROUNDED_AWAY)
"""What happens to every weight once the loss is all but zero."""


@rule(
    "U101", "frozen-weight", reads=("update/frozen_cause", "update/ratio", "train/loss", "train/loss_level"),
    per_scope=True, keep=100,
    remedies=(
        for_cause(FrozenCause.NOT_IN_OPTIMIZER, add_to_optimizer()),
        for_cause(FrozenCause.REQUIRES_GRAD_OFF, advise(
            "set_requires_grad", "it was turned off during the run; requires_grad_(True) turns it on again",
            scope_is="parameter",
        )),
        for_cause(FrozenCause.NO_GRADIENT, advise(
            "check_graph", "a detach(), a no_grad() block or a layer that is never called cuts it off from the loss",
            scope_is="parameter",
        )),
        for_cause(FrozenCause.ZERO_GRADIENT, advise(
            "inspect_layer", "its output is multiplied by zero: dead units, a mask over everything, a shut gate",
            scope_is="parameter",
        )),
        for_cause(FrozenCause.ZERO_LR, raise_lr(10.0, "at a learning rate of 0 nothing moves")),
        for_cause(FrozenCause.OPTIMIZER_NOT_STEPPED, advise(
            "call_optimizer_step", "backward() alone changes no weight"
        )),
        for_cause(FrozenCause.STEP_SKIPPED, advise(
            "lower_loss_scale", "the scaler found overflows and left these steps out; a few are how it finds its scale",
        )),
        for_cause(FrozenCause.ROUNDED_AWAY, keep_in_float32()),
        for_cause(FrozenCause.ROUNDED_AWAY, raise_lr(10.0, "an update must exceed the rounding of the weight")),
        advise("freeze_on_purpose", "requires_grad_(False) before the run says that it is meant", scope_is="parameter"),
    ),
)  # fmt: skip
def frozen_weight(causes: Panel, ratios: Panel, loss: Panel, levels: Panel, config: FrozenWeight) -> Iterator[Finding]:
    """Trainable weight that does not move.

    ## Why is this bad?
    It stays at its initial value while the rest of the model trains around it. Nothing fails, the loss even falls, only
    less far. The evidence names the cause: not in an optimizer group, requires_grad off, no gradient, a gradient of
    exactly zero, a learning rate of 0, an optimizer that does not step, or an update that is rounded away in low
    precision. What was frozen before the run began is meant to be, and is not reported. Where the loss is all but zero,
    a gradient that is zero or rounded away is information: nothing is left to learn.

    ## Example
    fires: update/frozen_cause{layer.weight} 0x3 5
    quiet: update/frozen_cause{layer.weight} 0x4 | update/frozen_cause{embedding.weight} 1x4
    """
    frozen = np.flatnonzero(np.isin(causes.last, _FROZEN)) if (causes.last > FrozenCause.ON_PURPOSE).any() else ()
    if not len(frozen):
        return
    ratio_of = dict(zip(ratios.scopes, ratios.last, strict=True)) if ratios.at == causes.at else {}
    solved = is_solved(loss, levels, config.negligible_share)
    for at in frozen:
        cause, scope = FrozenCause(int(causes.last[at])), causes.scopes[at]
        harmless = cause is FrozenCause.STEP_SKIPPED or (solved and cause in _WITHOUT_GRADIENT)
        severity = Severity.INFO if harmless else Severity.WARNING
        ratio = float(ratio_of.get(scope, np.nan))
        yield found(severity, ratio, config.ratio, scope, cause=cause.name.lower())


@rule(
    "U102", "update-ratio-high", reads=("update/ratio", "monitor/update_ratio_median", "train/loss"),
    when=("update/ratio", "monitor/update_ratio_median"), per_scope=True, hold=3, keep=100,
    explains=(
        "L101", "L102", "L103", "G101", "G102", "G103", "G104", "U101", "U103", "W101", "W102", "W104",
        "A101", "A102", "A103", "A104", "A106", "A107", "A108", "M102", "M103",
    ),
    remedies=(
        lower_lr(0.3, "an update of about a thousandth of the weights per step is what trains well"),
        warm_up(),
        clip_gradient(),
    ),
)  # fmt: skip
def update_ratio_high(
    ratios: Panel, median: Panel, loss: Panel, config: UpdateRatioHigh, info: RunInfo
) -> Iterator[Finding]:
    """Weights that are largely rewritten at each step.

    ## Why is this bad?
    An update of about a thousandth of the weight's norm per step trains well. Near a tenth nothing that was learned
    survives more than a few steps: the learning rate is too high for this tensor, or, where the median over all tensors
    is high, for the model. Only tensors of two dimensions or more count, for biases and the like start at zero; so do
    some matrices, and the first steps of Adam are its largest, so the bounds are wider in the first steps, and nothing
    is said there while the loss falls: small weights have a long way to go.

    ## Example
    fires: update/ratio{layer.weight} 0.01x100 0.2x3
    fires: monitor/update_ratio_median 0.01x100 0.05x3
    fires: monitor/update_ratio_median 5.0 0.7 0.4 0.2
    quiet: update/ratio{layer.weight} 0.01x100 0.2x2 0.05x3
    quiet: update/ratio{layer.weight} 1e9 1.0 0.5 0.33 0.25 0.2x5
    quiet: update/ratio{layer.bias} 0.2x120
    quiet: monitor/update_ratio_median 0.8 0.6 0.4 0.3 | train/loss 9.0 7.0 5.0 4.0
    """
    whole = Series(median)
    now = max(ratios.at, whole.at)
    starting = now < config.start_steps
    if starting and _has_fallen(Series(loss), config.learning):
        return
    if whole.at == now:
        typical = _median_of_matrices(ratios, info, config.near_zero_ratio) if ratios.at == now else whole.last
        typical = whole.last if np.isnan(typical) else typical
        bound = max(config.median, config.start_ratio) if starting else config.median
        if typical >= bound:
            yield found(Severity.WARNING, typical, bound)
    bound = max(config.tensor, config.start_ratio) if starting else config.tensor
    if ratios.at < now or not (high := ratios.last > bound).any():
        return
    for at in matrices(high, ratios.scopes, info):
        moves = ratios.values[ratios.values[:, at] > 0, at]
        if not (starting and moves[0] >= config.near_zero_ratio):
            yield found(Severity.WARNING, ratios.last[at], bound, ratios.scopes[at])


def _has_fallen(loss: Series, share: float) -> bool:
    """Whether the newest losses lie below the first by this share of it; False if nothing is known."""
    known = loss.finite()
    return len(known) > 2 and bool(np.median(known[-3:]) < known[0] - share * abs(known[0]))


def _median_of_matrices(ratios: Panel, info: RunInfo, near_zero_ratio: float) -> float:
    """The median over tensors of two dimensions or more that moved: what starts at zero would raise it."""
    if not len(ratios):
        return np.nan
    from_zero = ratios.values[0] >= near_zero_ratio
    moved = ratios.last[is_matrix(ratios.scopes, info) & ~from_zero]
    return median(moved[moved > 0])


@rule(
    "U103", "update-ratio-low",
    reads=("update/ratio", "update/frozen_cause", "train/lr", "train/loss", "train/loss_level"),
    per_scope=True, hold=3, keep=200,
    remedies=(
        raise_lr(10.0),
        keep_in_float32(),
        advise("inspect_layer", "its weights are very large, or its gradient very small, beside those of its peers",
               scope_is="parameter"),
    ),
)  # fmt: skip
def update_ratio_low(
    ratios: Panel, causes: Panel, lr: Panel, loss: Panel, levels: Panel, config: UpdateRatioLow, info: RunInfo
) -> Iterator[Finding]:
    """Weight that moves by less than its own rounding error.

    ## Why is this bad?
    At a ten-millionth of its norm per step a weight needs the whole of a long run to change at all, and in float32 most
    of its elements do not change. The learning rate of its group is too low by orders of magnitude, the weight too
    large, or its gradient almost gone.

    Judged as if the learning rate were at its peak, and not while it rises, so neither a warm-up from 0 nor the end of
    a decay is reported. Weights that do not move at all are `frozen-weight`. Where the loss is all but zero it is
    information: nothing is left to learn.

    ## Example
    fires: update/ratio{layer.weight} 1e-9x3 | train/lr{0} 1e-6x3
    quiet: update/ratio{layer.weight} 1e-9+1e-9x9 | train/lr{0} 1e-6+1e-6x9
    quiet: update/ratio{layer.weight} 1e-9x3 | update/frozen_cause{layer.weight} 5x3
    """
    low = (ratios.last > 0) & (ratios.last < config.tensor)
    if not low.any():
        return
    known = rates(lr)
    if len(known) > 1 and known[-1] > known[-2]:
        return
    peak = peak_rate(lr, info)
    at_peak = ratios.last * (peak / known[-1] if len(known) and known[-1] > 0 else 1.0)
    frozen = set(np.array(causes.scopes, object)[causes.last > 0]) if causes.at == ratios.at else set()
    severity = Severity.INFO if is_solved(loss, levels, config.negligible_share) else Severity.WARNING
    for at in matrices(low & (at_peak < config.tensor), ratios.scopes, info):
        if ratios.scopes[at] not in frozen:
            yield found(severity, ratios.last[at], config.tensor, ratios.scopes[at], at_peak_lr=float(at_peak[at]))


@rule(
    "U104", "update-ratio-jump",
    reads=("monitor/update_ratio_median", "train/lr", "train/lr_plan", "update/ratio"),
    when=("monitor/update_ratio_median", "train/lr"), per_scope=True, keep=500,
    explains=(
        "L101", "L102", "L103", "G101", "G102", "G103", "G104", "U101", "U102", "U103", "W101", "W102", "W103", "W104",
        "G106", "G110", "G111",
        "A101", "A102", "A103", "A104", "A106", "A107", "A108", "M102", "M103",
    ),
    remedies=(
        restore_lr(),
        roll_back(),
        clip_gradient(),
        advise("check_schedule", "the lr is that of another run, another unit (steps or epochs) or another batch size "
               "if nobody meant this jump"),
    ),
)  # fmt: skip
def update_ratio_jump(
    median: Panel, lr: Panel, plan: Panel, ratios: Panel, config: UpdateRatioJump, info: RunInfo
) -> Finding | None:
    """Weights that suddenly move several times as far per step as they did.

    ## Why is this bad?
    It is the earliest sign of a run about to be lost: the weights leave the region where the loss is low, and the loss
    shows it only steps later. Most often the learning rate has jumped; then the finding is made at that very step, with
    the ratio that it leads to, and names both rates. Otherwise the gradients have grown, or the optimizer lost its
    state.

    Compared is the median over all tensors with its own level at the last checks, each raised by what the learning rate
    has risen since by plan. So a warm-up, a slow schedule, the next of several cycles, a restart that returns to the
    earlier peak of its group, and whatever a declared plan says are quiet. So is a jump whose updates were measured at
    once, and are no larger than usual.

    ## Example
    fires: 0.001x12 0.03 | train/lr{0} 1e-3x12 3e-2
    fires: 0.001x12 _ _ | train/lr{0} 1e-3x13 3e-2
    quiet: 0.001+0.001x30 | train/lr{0} 1e-4+1e-4x30
    quiet: 0.001x12 0.002
    quiet: 0.001x13 | train/lr{0} 1e-3x12 3e-2
    quiet: 0.001x12 0.03 | train/lr{0} 1e-3x12 3e-2 | train/lr_plan{0} 1e-3x12 3e-2
    """
    typical = Series(median)
    if len(typical) < config.minimum:
        return None
    now = max(typical.at, lr.at)
    measured = typical.at == now and np.isfinite(typical.last)
    jump = newest_jump(lr, plan, config, info) if lr.at == now else None
    if not measured and jump is None:
        return None
    recent = typical.values[-config.window - 1 :]
    # The level is at least the least of the earlier values, for the growth by plan only raises them.
    if jump is None and not typical.last > config.factor * np.fmin.reduce(recent[:-1]):
        return None
    # What the rate just before led to is what a jump of it changes; older checks may be of another phase.
    window = config.window if jump is None else config.lasting_checks
    level = _level(typical, lr, plan, window, config, info) if measured else typical.median(config.window)
    leap = 1.0 if jump is None else jump.after / jump.before
    value = typical.last if measured else level * leap
    bound = config.factor * level
    if not bound > 0 or (measured and not value > bound):
        return None
    if jump is None:
        jump = last_jump(lr, plan, int(typical.steps[-len(recent)]), config, info)
    lasting = _trailing(recent > bound)
    severe = jump is not None or value >= config.warning_factor * level or lasting >= config.lasting_checks
    evidence: dict[str, float | str] = {}
    if jump is not None:
        evidence = {"lr_before": jump.before, "lr_after": jump.after}
    evidence |= {"level": level, "ratio": value / level, "lasting_checks": lasting}
    if jump is not None:
        evidence["lasting_steps"] = now - jump.step + 1
    evidence |= _furthest(ratios, now, config, info)
    return found(Severity.WARNING if severe else Severity.INFO, value, bound, "", **evidence)


def _level(typical: Series, lr: Panel, plan: Panel, window: int, config: UpdateRatioJump, info: RunInfo) -> float:
    """The update ratio that the earlier checks lead one to expect now."""
    values = typical.values[-window - 1 : -1].astype(np.float64)
    if len(lr) > 1:
        steps = typical.steps[-window - 1 : -1]
        values = values * planned_growth(lr, plan, steps, config, info)
    return median(values)


def _furthest(ratios: Panel, now: int, config: UpdateRatioJump, info: RunInfo) -> dict[str, float | str]:
    """The tensor whose own update ratio jumped most."""
    if ratios.at != now or len(ratios) < 2:
        return {}
    with np.errstate(divide="ignore", invalid="ignore"):
        jumps: Floats = ratios.last / ratios.median(config.window, skip=1)
    eligible = list(matrices(np.isfinite(jumps), ratios.scopes, info))
    if not eligible:
        return {}
    at = max(eligible, key=lambda each: float(jumps[each]))
    return {"tensor": ratios.scopes[at], "tensor_ratio": float(ratios.last[at])}


@rule(
    "U105", "optimizer-not-stepping", reads=("update/optimizer_steps", "update/skipped", "train/loss_scale"), keep=20,
    explains=("U101",),
    remedies=(
        advise("call_optimizer_step", "backward() alone changes no weight"),
        advise("step_the_monitor_less", "monitor.step() belongs after each optimizer.step(), not after each batch of "
               "an accumulation"),
        advise("use_bfloat16", "it has the range of float32 and needs no loss scale, if the scaler skips every step"),
    ),
)  # fmt: skip
def optimizer_not_stepping(
    steps: Series, skipped: Series, scale: Series, config: OptimizerNotStepping
) -> Finding | None:
    """Training loop that goes round without an optimizer step.

    ## Why is this bad?
    Nothing is learned. Either optimizer.step() is missing or behind a condition that never holds, or a gradient scaler
    finds an overflow in every step and leaves it out; a few of those are how it finds its scale. Where the monitor is
    stepped for every batch of an accumulation, a gap as long as one between two earlier steps is not reported.

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
    overflows = min(_trailing(skipped.values > 0), idle) if skipped.at == steps.at else 0
    if overflows >= config.skipped_steps:
        return found(
            Severity.WARNING, idle, config.skipped_steps, lasting_steps=idle, overflows=overflows, loss_scale=scale.last
        )
    bound = max(config.steps, longest + 1)
    if idle - overflows < bound:
        return None
    return found(Severity.WARNING, idle, bound, lasting_steps=idle)


@rule(
    "U106", "parameter-not-in-optimizer", reads=("update/frozen_cause",), per_scope=True, keep=100,
    explains=("U101", "G109"),
    remedies=(
        add_to_optimizer(),
        advise("freeze_on_purpose", "requires_grad_(False) before the run says that it is meant", scope_is="parameter"),
    ),
)  # fmt: skip
def parameter_not_in_optimizer(causes: Panel) -> Iterator[Finding]:
    """Trainable parameter that no optimizer group holds.

    ## Why is this bad?
    It gets gradients and never moves. It was added to the model after the optimizer was made, is left out by a filter
    over names, or was replaced by another tensor when the model was moved or tied. Its gradient is not cleared by
    optimizer.zero_grad() either, and grows without end.

    ## Example
    fires: update/frozen_cause{head.weight} 2
    quiet: update/frozen_cause{head.weight} 0 1 5
    """
    for at in np.flatnonzero(causes.last == float(FrozenCause.NOT_IN_OPTIMIZER)):
        yield found(Severity.WARNING, causes.last[at], NO_BOUND, causes.scopes[at])


def _trailing(flags: NDArray[np.bool_]) -> int:
    """How many at the end are True in a row."""
    return int(np.argmin(np.append(flags[::-1], False)))
