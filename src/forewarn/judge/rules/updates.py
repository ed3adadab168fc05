"""Rules about how far the optimizer moves the weights."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from forewarn.judge.headlines import Message
from forewarn.judge.lr_course import (
    is_above_declared,
    is_raised,
    last_jump,
    newest_jump,
    peak_rate,
    planned_growth,
    rates,
)
from forewarn.judge.objective import is_objective
from forewarn.judge.optimizers import of_group, steps_grow_with_gradients
from forewarn.judge.registry import finding, rule
from forewarn.judge.remedies import (
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
from forewarn.judge.series import MAD_TO_STD, Bools, Floats, Panel, Series, median, middle, nanmedian, trailing
from forewarn.judge.tensor_kinds import gain_factors, is_matrix, matrices
from forewarn.judge.upcoming import Upcoming, any_of
from forewarn.settings import Settings, between
from forewarn.types import Finding, RunInfo, Severity

_HALF_DECADE = math.sqrt(10)
_LOWEST_FACTOR, _HIGHEST_FACTOR = 1e-2, 1e4
"""Largest changes of the learning rate that are advised at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRatioHigh(Settings):
    """When `update-ratio-high` fires."""

    tensor: float = between(0.1, 0.0)
    """Update ratio of one tensor above which it is rewritten rather than trained."""
    median: float = between(3e-2, 0.0)
    """Median update ratio over all tensors from which the learning rate is too high."""
    start_steps: int = between(100, 0, counts="steps")
    """First steps, with wider limits: weights start small, and the first steps of Adam are its largest. For as many
    steps, a tensor that was exactly zero is ignored."""
    start_ratio: float = between(0.2, 0.0)
    """Both limits during the first steps."""
    near_zero_ratio: float = between(10.0, 0.0)
    """First ratio from which a tensor counts as starting near zero; it is ignored during the first steps."""
    learning: float = between(0.2, 0.0, 1.0)
    """Fall of the loss, as a fraction of the first loss, from which nothing fires during the first steps. A rise by as
    much fires at once."""
    first_losses: int = between(10, 0, counts="readings")
    """Number of losses to wait for at the start of a run with SGD, if the loss neither falls nor rises by that much."""
    gone: float = between(0.01, 0.0, 1.0)
    """Fraction of the first loss below which it has not been learned, if it gets there while the rule would wait."""
    waiting_factor: float = between(2.0, 1.0)
    """Multiple of the limits above which it does not wait."""
    kept: float = between(0.9, 0.0, 1.0)
    """Fraction of the largest fall so far that the loss must have kept to make progress. It is then information, unless
    the median exceeds `start_ratio`."""
    significance: float = between(3.0, 0.0)
    """Standard deviations of the recent losses that this fall must exceed."""
    declared_factor: float = between(1.25, 1.0)
    """Multiple of the highest declared learning rate above which the loss no longer makes it information."""
    game_factor: float = between(2.0, 1.0)
    """Multiple of the limits where the loss is not the objective: a GAN or a policy may train well with large steps."""
    wanted: float = between(3e-3, 0.0)
    """Median update ratio that the first remedy aims at."""
    usual_gain: float = between(0.3, 0.0)
    """Gain of the initial weights of a layer at least, as usual initializations have it. An update of a matrix that is
    smaller, such as the head of a policy, is compared with a matrix of this gain."""


@rule(
    "U102", "update-ratio-high",
    reads=(
        "update/ratio", "monitor/update_ratio_median", "train/loss", "update/norm", "update/separate_losses",
        "train/loss_level", "train/lr", "train/lr_plan",
    ),
    when=("update/ratio", "monitor/update_ratio_median"), per_scope=True, hold=3, keep=100,
    explains=(
        "L101", "L102", "L103", "L106", "L107", "L108", "E107", "G101", "G102", "G103", "G104", "G105", "G106", "G107",
        "G110", "G111", "U101", "U103", "W101", "W102", "W104",
        "A101", "A102", "A103", "A104", "A106", "A107", "A108", "M102", "M103",
    ),
    settings=UpdateRatioHigh,
    message=(
        Message("Each step changes too much of {scope}", "update/weight ratio {value} · limit {bound}"),
        Message("Each step changes too much of the model", "median update/weight ratio {value} · limit {bound}"),
    ),
    remedies=(
        lower_lr(0.3, "a step of about 0.1% of the weight norm trains well"),
        warm_up(),
        clip_gradient(),
    ),
)  # fmt: skip
def update_ratio_high(
    ratios: Panel,
    medians: Panel,
    loss: Panel,
    norms: Panel,
    separate: Panel,
    levels: Panel,
    lr: Panel,
    plan: Panel,
    settings: UpdateRatioHigh,
    info: RunInfo,
) -> Iterator[Finding]:
    """Each step changes too much of the weights.

    ## Why is this bad?
    An update of about a thousandth of the weight norm per step trains well. Near a tenth, nothing that was learned
    survives more than a few steps. The learning rate is too high for this tensor, or, if the median over all tensors
    is high, for the model.

    Only tensors with two or more dimensions count, since biases and the like start at zero. A matrix that was zero,
    such as one half of a LoRA adapter, is ignored for its first 100 steps. One that starts much smaller than usual,
    such as the head of a policy, is compared with the usual size: a step that doubles it changes little.

    The first steps of Adam are its largest. So the limits are wider during the first steps, and nothing fires then
    while the loss falls. With SGD, whose steps shrink with the gradients, the loss gets ten steps to begin. Later it is
    information while the loss makes progress, unless the learning rate is above every declared one: that was not meant.

    ## Example
    fires: update/ratio{layer.weight} 0.01x100 0.2x3
    fires: monitor/update_ratio_median 0.01x100 0.05x3
    fires: monitor/update_ratio_median 5.0 0.7 0.4 0.2
    quiet: update/ratio{layer.weight} 0.01x100 0.2x2 0.05x3
    quiet: update/ratio{layer.weight} nan 1.0 0.5 0.33 0.25 0.2x5 | update/norm{layer.weight} 0.1x10
    quiet: update/ratio{layer.bias} 0.2x120
    quiet: monitor/update_ratio_median 0.8 0.6 0.4 0.3 | train/loss 9.0 7.0 5.0 4.0
    """
    overall = medians.series()
    least = min(settings.tensor, settings.median)
    if (ratios.last < least).all() and not overall.last >= least:
        return  # no limit is lower, in any phase of a run
    now = max(ratios.at, overall.at)
    starting = now < settings.start_steps
    if starting and _has_fallen(loss.series(), settings):
        return
    waits = starting and _may_settle(loss.series(), settings) and steps_grow_with_gradients(info)
    patience = settings.waiting_factor**waits  # 1 if it does not wait
    if not starting and not is_objective(loss.series(), separate.series(), info):
        patience *= settings.game_factor
    learns = _makes_progress(loss.series(), levels.series(), settings)
    learns = learns and not is_above_declared(lr, plan, settings.declared_factor, info)
    from_zero = _left_zero(ratios, norms, now - settings.start_steps)
    compared = _of_usual_size(ratios, norms, settings.usual_gain, info)
    latest, near_zero = compared[-1], compared[0] >= settings.near_zero_ratio
    if overall.at == now:
        eligible = is_matrix(ratios.scopes, info) & ~(near_zero | from_zero)
        typical = median(latest[eligible & (latest > 0)]) if ratios.at == now else overall.last
        typical = overall.last if np.isnan(typical) and not from_zero.any() else typical
        bound = max(settings.median, settings.start_ratio) if starting else settings.median
        if typical >= patience * bound:
            harmless = learns and typical < settings.start_ratio
            severity = Severity.INFO if harmless else Severity.WARNING
            yield finding(severity, typical, bound, lr_factor=lr_factor(settings.wanted, typical))
    bound = max(settings.tensor, settings.start_ratio) if starting else settings.tensor
    if ratios.at < now or not (high := latest > patience * bound).any():
        return
    for index in matrices(high & ~from_zero & ~(starting & near_zero), ratios.scopes, info):
        yield finding(Severity.INFO if learns else Severity.WARNING, latest[index], bound, ratios.scopes[index])


def lr_factor(wanted: float, ratio: float) -> float:
    """The factor on the learning rate that brings an update ratio near the wanted one, rounded to half a decade."""
    factor = min(max(wanted / ratio, _LOWEST_FACTOR), _HIGHEST_FACTOR)
    return float(_HALF_DECADE ** round(math.log(factor, _HALF_DECADE)))


def _has_fallen(loss: Series, settings: UpdateRatioHigh) -> bool:
    """Whether the latest losses are well below the first one; False if unknown.

    A positive loss that is gone within a few steps has not been learned: a policy may have become deterministic.
    """
    losses = loss.finite()
    if len(losses) < 3:
        return False
    now, first = middle(losses[-3:]), float(losses[0])
    is_gone = len(losses) <= settings.first_losses and losses[-1] < settings.gone * first and first > 0
    return now < first - settings.learning * abs(first) and not is_gone


def _makes_progress(loss: Series, levels: Series, settings: UpdateRatioHigh) -> bool:
    """Whether the loss is well below its start, by its own noise, and near its best level; False if unknown."""
    medians, recent = levels.finite(), loss.finite(settings.first_losses)
    if not len(medians) or not len(recent):
        return False
    now = median(recent)
    gain = float(medians[0]) - min(now, float(medians.min()))
    noise = MAD_TO_STD * median(np.abs(recent - now))
    return gain > settings.significance * noise and now <= float(medians[0]) - settings.kept * gain


def _may_settle(loss: Series, settings: UpdateRatioHigh) -> bool:
    """Whether there are too few losses to tell, and the latest are not well above the first."""
    losses = loss.finite()
    if not 0 < len(losses) < settings.first_losses or not math.isfinite(loss.last):
        return False
    return bool(middle(losses[-3:]) <= losses[0] + settings.learning * abs(losses[0]))


def _left_zero(ratios: Panel, norms: Panel, since: int) -> Bools:
    """Which tensors moved away from exactly zero after step `since`: that update has a norm, but no ratio."""
    rows, moved = ratios.values[ratios.steps > since], norms.values[norms.steps > since]
    if ratios.scopes != norms.scopes or len(rows) != len(moved):
        return np.zeros(len(ratios.scopes), bool)
    return np.array((np.isnan(rows) & (moved > 0)).any(axis=0), bool)


def typical_ratios(ratios: Panel, info: RunInfo) -> Floats:
    """The median update ratio of the matrices that moved, at each reading."""
    moved = ratios.values[:, is_matrix(ratios.scopes, info)]
    return nanmedian(np.where(moved > 0, moved, np.nan).T)


def _of_usual_size(ratios: Panel, norms: Panel, gain: float, info: RunInfo) -> Floats:
    """The first and the latest ratios; of a matrix with less than this gain, those to a matrix that has it."""
    if not len(ratios):
        return np.full((2, len(ratios.scopes)), np.nan)
    compared: Floats = ratios.values[[0, -1]].astype(np.float64)
    if norms.scopes != ratios.scopes or len(norms) != len(ratios) or gain == 0:
        return compared
    _, highest = gain_factors(ratios.scopes, info)
    is_known = highest > 0
    usual = norms.values[[0, -1]][:, is_known] * highest[is_known] / gain
    compared[:, is_known] = np.fmin(compared[:, is_known], usual)
    return compared


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRatioLow(Settings):
    """When `update-ratio-low` fires."""

    tensor: float = between(1e-7, 0.0)
    """Update ratio of one tensor below which it barely trains; at exactly zero it is frozen."""
    negligible_share: float = between(1e-6, 0.0, 1.0)
    """Fraction of the highest loss below which this is only information: the task is solved."""
    wanted: float = between(1e-3, 0.0)
    """Update ratio that the first remedy aims at."""
    peers: float = between(1e-5, 0.0)
    """Median update ratio of its group above which this is only information: the learning rate is not to blame."""


@rule(
    "U103", "update-ratio-low",
    reads=("update/ratio", "update/frozen_cause", "train/lr", "train/loss", "train/loss_level"),
    per_scope=True, hold=3, keep=200,
    settings=UpdateRatioLow,
    message=Message("Steps barely change {scope}", "update/weight ratio {value} · expected at least {bound}"),
    remedies=(
        for_cause("rate", raise_lr(10.0)),
        keep_in_float32(),
        advise("inspect_layer", "Compare {scope} with layers of the same kind",
               "its weights may be very large, or its gradient very small", scope_is="parameter"),
    ),
)  # fmt: skip
def update_ratio_low(
    ratios: Panel, causes: Panel, lr: Panel, loss: Panel, levels: Panel, settings: UpdateRatioLow, info: RunInfo
) -> Iterator[Finding]:
    """Steps change a weight by less than its rounding error.

    ## Why is this bad?
    At a ten-millionth of its norm per step, a weight hardly changes over a long run. In float32 most of its elements do
    not change at all. The learning rate of its group is too low by orders of magnitude, the weight is too large, or its
    gradient has almost vanished.

    The rule scales the ratio to the peak learning rate, and waits while the rate rises. So neither a warm-up from 0 nor
    the end of a decay fires. `frozen-weight` reports weights that do not move at all. If the loss is almost zero this
    is only information, since nothing is left to learn. So it is if other weights at the same rate move as they should:
    then a few huge values, such as those of a mask, make this one look as if it stood still.

    ## Example
    fires: update/ratio{layer.weight} 1e-9x3 | train/lr{0} 1e-6x3
    quiet: update/ratio{layer.weight} 1e-9+1e-9x9 | train/lr{0} 1e-6+1e-6x9
    quiet: update/ratio{layer.weight} 1e-9x3 | update/frozen_cause{layer.weight} 5x3
    """
    low = (ratios.last > 0) & (ratios.last < settings.tensor)
    if not low.any():
        return
    used = rates(lr)
    if len(used) > 1 and used[-1] > used[-2]:
        return
    peak = peak_rate(lr, info)
    at_peak = ratios.last * (peak / used[-1] if len(used) and used[-1] > 0 else 1.0)
    frozen = set(np.array(causes.scopes, object)[causes.last > 0]) if causes.at == ratios.at else set()
    solved = is_solved(loss, levels, settings.negligible_share)
    for index in matrices(low & (at_peak < settings.tensor), ratios.scopes, info):
        if ratios.scopes[index] in frozen:
            continue
        peers = at_peak[is_matrix(ratios.scopes, info) & of_group(ratios.scopes, ratios.scopes[index], info)]
        alone = median(peers[peers > 0]) > settings.peers
        yield finding(
            Severity.INFO if solved or alone else Severity.WARNING, ratios.last[index], settings.tensor,
            ratios.scopes[index], cause="tensor" if alone else "rate", at_peak_lr=float(at_peak[index]),
            lr_factor=lr_factor(settings.wanted, float(at_peak[index])),
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRatioJump(Settings):
    """When `update-ratio-jump` fires."""

    factor: float = between(3.0, 1.0)
    """Times the usual level above which the update ratio has jumped."""
    window: int = between(20, 3, counts="readings")
    """Number of recent measured steps whose median is the usual level."""
    minimum: int = between(8, 2, counts="readings")
    """Minimum number of measured steps before the rule can fire."""
    warning_factor: float = between(10.0, 1.0)
    """Times the usual level at which a single measured step is a warning; a jump of the lr always is."""
    lasting_checks: int = between(3, 1, counts="readings")
    """Measured steps in a row after which a jump of any size is a warning."""
    restart_tolerance: float = between(0.01, 0.0)
    """Distance from its earlier peak, as a fraction, within which a jump of the lr is a planned restart."""
    known_factor: float = between(1.25, 1.0)
    """Multiple of its earlier peak up to which a jump of the lr is information only: the run has trained there."""


def _raised(metric: str, upcoming: Upcoming, factor: float) -> Bools | None:
    """Where a group's upcoming learning rate is at least this many times the one before it."""
    lr = upcoming.joined(metric)
    if metric != "train/lr" or lr is None or lr.scopes == ("",):
        return None
    rates = lr.values.astype(np.float64)
    raised = any_of(rates[1:] >= factor * rates[:-1])
    return np.append(False, raised)[-len(upcoming.columns[metric].steps) :]


@rule(
    "U104", "update-ratio-jump",
    reads=("monitor/update_ratio_median", "train/lr", "train/lr_plan", "update/ratio"),
    when=("monitor/update_ratio_median", "train/lr"), per_scope=True, keep=500,
    gate=lambda settings, _info: lambda _step, median, history: (
        not math.isnan(median) or is_raised(*history.newest("train/lr").two, settings.factor)
    ),
    lookahead=lambda settings, _info: lambda metric, upcoming: _raised(metric, upcoming, settings.factor),
    explains=(
        "L101", "L102", "L103", "L106", "L107", "L108", "E107", "G101", "G102", "G103", "G104", "G105", "G106", "G107",
        "G110", "G111", "U101", "U102", "U103", "W101", "W102", "W103", "W104",
        "A101", "A102", "A103", "A104", "A106", "A107", "A108", "M102", "M103",
    ),
    settings=UpdateRatioJump,
    message=(
        Message(
            "Weights suddenly move {ratio:×} as far per step",
            "update/weight ratio {value} · limit {bound} · usual {level}",
            "the learning rate went from {lr_before} to {lr_after}",
        ),
        Message(
            "Weights suddenly move {ratio:×} as far per step",
            "update/weight ratio {value} · limit {bound} · usual {level}",
        ),
    ),
    remedies=(
        restore_lr(),
        roll_back(),
        clip_gradient(),
        advise("check_schedule", "Check the schedule around step {step}",
               "it may come from another run, count epochs instead of steps, or assume another batch size"),
    ),
)  # fmt: skip
def update_ratio_jump(
    median: Panel, lr: Panel, plan: Panel, ratios: Panel, settings: UpdateRatioJump, info: RunInfo
) -> Finding | None:
    """Weights suddenly move several times as far per step as before.

    ## Why is this bad?
    It is the earliest sign that a run is about to fail. The weights leave the region where the loss is low, and the
    loss shows it only steps later. Most often the learning rate has jumped. Then the rule fires at that very step, with
    the ratio to expect, and names both rates. Otherwise the gradients have grown, or the optimizer has lost its state.

    The rule compares the median over all tensors with its usual level, raised by any planned rise of the learning rate.
    So a warm-up, a slow schedule and another cycle do not fire. Nor does a restart to the group's earlier peak, or
    anything in a declared plan. Neither does a jump whose measured updates are no larger than usual. A jump to a rate
    that is not much above an earlier or declared one is information only.

    ## Example
    fires: 0.001x12 0.03 | train/lr{0} 1e-3x12 3e-2
    fires: 0.001x12 0.03
    fires: 0.001x12 _ _ | train/lr{0} 1e-3x13 3e-2
    quiet: 0.001+0.001x30 | train/lr{0} 1e-4+1e-4x30
    quiet: 0.001x12 0.002
    quiet: 0.001x13 | train/lr{0} 1e-3x12 3e-2
    quiet: 0.001x12 0.03 | train/lr{0} 1e-3x12 3e-2 | train/lr_plan{0} 1e-3x12 3e-2
    """
    typical = median.series()
    if len(typical) < settings.minimum:
        return None
    now = max(typical.at, lr.at)
    measured = typical.at == now and math.isfinite(typical.last)
    jump = newest_jump(lr, plan, settings, info) if lr.at == now else None
    if not measured and jump is None:
        return None
    recent = typical.values[-settings.window - 1 :]
    # The level is at least the minimum of the earlier values, since the planned growth only raises them.
    if jump is None and not typical.last > settings.factor * np.fmin.reduce(recent[:-1]):
        return None
    # A jump of the lr is compared with the measured steps just before it; older ones may belong to another phase.
    window = settings.window if jump is None else settings.lasting_checks
    level = _level(typical, lr, plan, window, settings, info) if measured else typical.median(settings.window)
    leap = 1.0 if jump is None else jump.after / jump.before
    value = typical.last if measured else level * leap
    bound = settings.factor * level
    if not bound > 0 or (measured and not value > bound):
        return None
    if jump is None:
        jump = last_jump(lr, plan, int(typical.steps[-len(recent)]), settings, info)
    lasting = trailing(recent > bound)
    severe = jump is not None or value >= settings.warning_factor * level or lasting >= settings.lasting_checks
    severe &= jump is None or jump.after > settings.known_factor * jump.peak
    evidence: dict[str, float | str] = {}
    if jump is not None:
        evidence = {"lr_before": jump.before, "lr_after": jump.after} | ({"group": jump.group} if jump.group else {})
    evidence |= {"level": level, "ratio": value / level, "lasting_checks": lasting}
    if jump is not None:
        evidence["lasting_steps"] = now - jump.step + 1
    evidence |= _furthest(ratios, now, settings, info)
    return finding(Severity.WARNING if severe else Severity.INFO, value, bound, "", **evidence)


def _level(typical: Series, lr: Panel, plan: Panel, window: int, settings: UpdateRatioJump, info: RunInfo) -> float:
    """The update ratio expected now, from the earlier measured steps."""
    values = typical.values[-window - 1 : -1].astype(np.float64)
    if len(lr) > 1:
        steps = typical.steps[-window - 1 : -1]
        values = values * planned_growth(lr, plan, steps, settings, info)
    return median(values)


def _furthest(ratios: Panel, step: int, settings: UpdateRatioJump, info: RunInfo) -> dict[str, float | str]:
    """The tensor whose own update ratio jumped most."""
    if ratios.at != step or len(ratios) < 2:
        return {}
    with np.errstate(divide="ignore", invalid="ignore"):
        jumps: Floats = ratios.last / ratios.median(settings.window, skip=1)
    eligible = list(matrices(np.isfinite(jumps), ratios.scopes, info))
    if not eligible:
        return {}
    index = max(eligible, key=lambda candidate: float(jumps[candidate]))
    return {"tensor": ratios.scopes[index], "tensor_ratio": float(ratios.last[index])}


@dataclass(frozen=True, kw_only=True)
class UpdateThresholds(Settings):
    """The settings of the rules in this file, by the name of the rule."""

    update_ratio_high: UpdateRatioHigh = UpdateRatioHigh()
    update_ratio_low: UpdateRatioLow = UpdateRatioLow()
    update_ratio_jump: UpdateRatioJump = UpdateRatioJump()
