"""Rules about the learning rate of each parameter group, compared with what its schedule should do."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from forewarn.judge.headlines import Message
from forewarn.judge.history import History
from forewarn.judge.lr_course import declared_peak, declared_peaks, peak_rates
from forewarn.judge.registry import Gate, Since, finding, rule
from forewarn.judge.remedies import advise, declared, for_cause, raise_lr, restore_lr, set_lr
from forewarn.judge.series import Bools, Floats, Panel
from forewarn.judge.upcoming import Lookahead, Upcoming, any_of, never
from forewarn.settings import Settings, between
from forewarn.types import Finding, RunInfo, Severity


@dataclass(frozen=True, slots=True, kw_only=True)
class LrOffPlan(Settings):
    """When `lr-off-plan` fires."""

    tolerance: float = between(0.05, 0.0)
    """Allowed deviation from the planned rate, as a fraction of it."""
    negligible: float = between(0.005, 0.0)
    """Deviation that is always allowed, as a fraction of the highest planned rate."""


@rule(
    "U107", "lr-off-plan", reads=("train/lr", "train/lr_plan"), per_scope=True, hold=3, keep=20,
    gate=lambda _settings, _info: lambda _step, _lr, history: "train/lr_plan" in history,
    lookahead=lambda _settings, _info: lambda metric, upcoming: (
        None if "train/lr_plan" in upcoming else never(metric, upcoming)
    ),
    explains=("U102", "U103", "U104", "U109", "U110", "U111"),
    settings=LrOffPlan,
    message=Message(
        "The learning rate does not follow its plan",
        "learning rate {value} · planned {bound} · group {group}",
    ),
    remedies=(
        set_lr("this is the planned value for this step"),
        advise("check_scheduler", "Call scheduler.step() once after each optimizer.step()",
               "the plan counts one scheduler step per optimizer step, also after a resume"),
    ),
)  # fmt: skip
def lr_off_plan(lr: Panel, plan: Panel, settings: LrOffPlan) -> Iterator[Finding]:
    """The learning rate differs from the one planned for this step.

    ## Why is this bad?
    The run is not the one you planned. Often a scheduler made for steps is stepped once per epoch, or the other way
    round. Or it is stepped twice, or before the optimizer. A resume may have restored the optimizer but not the
    scheduler. Or the total number of steps comes from an earlier config.

    ## Example
    fires: train/lr{0} 1e-3x3 | train/lr_plan{0} 1e-4x3
    quiet: train/lr{0} 1e-3x3 | train/lr_plan{0} 1.01e-3x3
    """
    if plan.at != lr.at or plan.scopes != lr.scopes:
        return
    actual, meant = lr.last.astype(np.float64), plan.last.astype(np.float64)
    allowed = settings.tolerance * meant + settings.negligible * np.fmax.reduce(plan.values, axis=0, initial=0.0)
    with np.errstate(invalid="ignore"):
        missed = np.abs(actual - meant) > allowed
    for group in np.flatnonzero(missed):
        yield finding(Severity.WARNING, actual[group], meant[group], lr.scopes[group])


@dataclass(frozen=True, slots=True, kw_only=True)
class LrJumpOnResume(Settings):
    """When `lr-jump-on-resume` fires."""

    factor: float = between(1.5, 1.0)
    """Largest factor, up or down, by which the rate may change on resume."""


@rule(
    "U108", "lr-jump-on-resume", reads=("monitor/resumed", "train/lr", "train/lr_plan"), per_scope=True, keep=50,
    explains=(
        "L101", "L102", "L103", "L106", "L107", "L108", "G101", "G102", "G103", "G104", "G105", "G106", "G107", "G110",
        "G111", "U101", "U102", "U104", "U107", "W101", "W102", "W104", "A101", "A102", "A103", "A104", "A106", "A107",
        "A108", "E104", "E107", "M102", "M103",
    ),
    settings=LrJumpOnResume,
    message=Message(
        "The learning rate changed on resume",
        "learning rate {value} · before {lr_before} · group {group}",
    ),
    remedies=(
        advise("restore_scheduler", "Save and restore the scheduler with the checkpoint",
               "with its state_dict() loaded after the optimizer's, the schedule continues where it was"),
    ),
)  # fmt: skip
def lr_jump_on_resume(resumed: Panel, lr: Panel, plan: Panel, settings: LrJumpOnResume) -> Finding | None:
    """The learning rate changed on resume.

    ## Why is this bad?
    A schedule should continue where it was. If it starts over, trained weights go through the warm-up and the peak a
    second time. If it is lost, the run continues at whatever rate the config says. A change that the plan of the group
    contains does not fire.

    ## Example
    fires: monitor/resumed _x20 1 | train/lr{0} 1e-4x20 1e-3
    quiet: monitor/resumed _x20 1 | train/lr{0} 1e-4x20 1.01e-4
    quiet: monitor/resumed _x20 1 | train/lr{0} 1e-3x20 1e-4 | train/lr_plan{0} 1e-3x20 1e-4
    """
    if resumed.at != lr.at or "" not in resumed.scopes or len(lr) < 2:
        return None
    before, after = lr.values[-2].astype(np.float64), lr.values[-1].astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        change = np.abs(np.log(after / before))
        off_plan = ~(np.abs(np.log(after / _planned(lr, plan))) <= math.log(settings.factor))
    change[~((after > 0) & (before > 0) & off_plan)] = 0.0
    group = int(change.argmax())
    if not change[group] > math.log(settings.factor):
        return None
    return finding(
        Severity.WARNING, after[group], before[group], "", group=lr.scopes[group], lr_before=float(before[group])
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LrSpent(Settings):
    """When `lr-spent` fires."""

    share: float = between(1e-3, 0.0, 1.0)
    """Fraction of its peak below which the learning rate counts as close to zero."""
    steps: int = between(50, 1, counts="steps")
    """Minimum number of further steps before the rule fires."""
    going_on: float = between(0.2, 0.0)
    """The same as a fraction of the steps before: the last steps of a long run do not fire."""
    sudden: float = between(0.1, 0.0, 1.0)
    """Fraction of its peak that the learning rate must have had one step before, if it fell at once. No schedule does
    that, so the rule does not wait."""
    sudden_steps: int = between(2, 1, counts="steps")
    """Number of steps close to zero after which it fires then."""


def _far_below_a_peak(settings: LrSpent, info: RunInfo) -> Gate:
    declared = declared_peak(info)

    def is_far_below(_step: int, _lr: float, history: History) -> bool:
        lr = history.newest("train/lr")
        return not lr.last or not min(lr.last) >= settings.share * max(lr.peak, declared)

    return is_far_below


def _far_below_upcoming_peaks(settings: LrSpent, info: RunInfo) -> Lookahead:
    declared = declared_peak(info)

    def look(metric: str, upcoming: Upcoming) -> Bools | None:
        lr = upcoming.joined(metric)
        if lr is None:
            return None
        bound = settings.share * float(np.fmax.reduce(lr.values, axis=None, initial=declared))  # at any of the steps
        return any_of(~(upcoming.columns[metric].values.astype(np.float64) >= bound))

    return look


@rule(
    "U109", "lr-spent", reads=("train/lr", "train/lr_plan"), per_scope=True, keep=100,
    gate=_far_below_a_peak,
    lookahead=_far_below_upcoming_peaks,
    explains=("L104", "L105", "U101", "U103"),
    settings=LrSpent,
    message=(
        Message(
            "Learning rate close to zero from one step to the next",
            "learning rate {value} · limit {bound} · before {lr_before} · group {group}",
            "it fell at step {spent_at}, further than any schedule does in one step",
        ),
        Message(
            "Learning rate close to zero for {lasting_steps} steps",
            "learning rate {value} · limit {bound} · peak {peak} · group {group}",
        ),
    ),
    remedies=(
        for_cause("sudden", restore_lr("the loss was still falling at that rate", scope_is_group=True)),
        advise("step_scheduler_per_epoch", "Step the scheduler once per epoch if it counts epochs",
               "stepped with every batch, it ends far too early"),
        advise("lengthen_schedule", "Plan the schedule for all optimizer steps of the run",
               "the schedule ended before training did"),
        raise_lr(1.0, "the run can then continue to learn", scope_is_group=True),
    ),
)  # fmt: skip
def lr_spent(lr: Panel, plan: Panel, settings: LrSpent, info: RunInfo) -> Iterator[Finding]:
    """Training continues with a learning rate close to zero.

    ## Why is this bad?
    Every further step costs time and changes nothing. The usual cause is a scheduler made for epochs that is stepped
    with every batch, or a number of steps in the wrong unit. The last steps of a schedule that ends at zero do not
    fire. The run must continue for 50 steps, and for a fifth of the steps before. A parameter group whose plan ends
    while other groups still learn does not fire either. A rate that falls there within one step, from a tenth of its
    peak or more, fires at once: schedules do not do that.

    ## Example
    fires: train/lr{0} 1e-3x100 1e-4x10 1e-5x10 1e-7x60
    fires: train/lr{0} 1e-3x100 1e-7x2
    quiet: train/lr{0} 1e-3x100 1e-4x20 1e-5x20 1e-6x20 1e-7x20
    quiet: train/lr{0} 1e-3x1000 1e-4x10 1e-5x10 0x60
    quiet: train/lr{0} 1e-3x100 0x60 | train/lr{1} 1e-3x160 | train/lr_plan{0} 1e-3x100 0x60 | train/lr_plan{1} 1e-3x160
    """
    peaks = peak_rates(lr, info)
    spent = [rate < settings.share * peak for rate, peak in zip(lr.last.tolist(), peaks, strict=True)]
    if not any(spent):
        return
    meant = _planned(lr, plan) < settings.share * np.array(peaks)
    for group in np.flatnonzero(np.array(spent) & ~(meant & (not all(spent)))):
        alive = np.flatnonzero(lr.values[:, group].astype(np.float64) >= settings.share * peaks[group])
        first = int(alive[-1]) + 1 if len(alive) else 0
        since = int(lr.steps[first])
        lasting = lr.at - since + 1
        before = float(lr.values[alive[-1], group]) if len(alive) else 0.0
        is_next_step = first > 0 and since - int(lr.steps[first - 1]) == 1  # else it may have decayed in between
        is_sudden = is_next_step and before >= settings.sudden * peaks[group]
        if lasting >= (settings.sudden_steps if is_sudden else max(settings.steps, settings.going_on * since)):
            evidence: dict[str, float | str] = {}
            if is_sudden:
                evidence = {"lr_before": before, "lr_after": float(lr.last[group]), "cause": "sudden"}
            yield finding(
                Severity.WARNING, lr.last[group], settings.share * peaks[group], lr.scopes[group],
                peak=peaks[group], spent_at=since, lasting_steps=lasting, **evidence,
            )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUpWithoutEnd(Settings):
    """When `warm-up-without-end` fires."""

    share: float = between(0.3, 0.0, 1.0)
    """Fraction of the declared total steps by which a warm-up should be over."""
    steps: int = between(20000, 1, counts="steps")
    """The same in steps, used if no total is declared; then it is only information."""


def _longest_warm_up(settings: WarmUpWithoutEnd, info: RunInfo) -> tuple[Severity, float]:
    """The severity of a warm-up that does not end, and the step by which it should have ended."""
    total = declared(info, "total_steps")
    return (Severity.INFO, settings.steps) if math.isnan(total) else (Severity.WARNING, settings.share * total)


def _past_a_warm_up(settings: WarmUpWithoutEnd, info: RunInfo) -> Gate:
    _, least = _longest_warm_up(settings, info)

    def still_rises(step: int, _lr: float, history: History) -> bool:
        return step >= least and any(map(operator.lt, *history.newest("train/lr").two))

    return still_rises


def _rises_past_a_warm_up(settings: WarmUpWithoutEnd, info: RunInfo) -> Lookahead:
    _, least = _longest_warm_up(settings, info)

    def look(metric: str, upcoming: Upcoming) -> Bools | None:
        steps, lr = upcoming.columns[metric].steps, upcoming.joined(metric)
        if lr is None:
            return None
        places = np.arange(len(lr))[:, None]
        stands = np.insert(~(lr.values[1:] > lr.values[:-1]), 0, True, axis=0)
        lasting = (places - np.maximum.accumulate(np.where(stands, places, 0)))[-len(steps) :]
        return (steps >= least) & any_of(lasting >= max(1, len(lr) - len(steps) - 1))

    return look


@rule(
    "U110", "warm-up-without-end", reads=("train/lr",), per_scope=True, keep=100,
    gate=_past_a_warm_up,
    lookahead=_rises_past_a_warm_up,
    settings=WarmUpWithoutEnd,
    message=Message(
        "The learning rate is still warming up",
        "step {value} · expected end step {bound} · learning rate {lr} · group {group}",
    ),
    remedies=(
        advise("shorten_warm_up", "Shorten the warm-up to a few thousand steps at most",
               "a length in samples or tokens instead of optimizer steps is a common mistake"),
    ),
)  # fmt: skip
def warm_up_without_end(lr: Panel, settings: WarmUpWithoutEnd, info: RunInfo) -> Iterator[Finding]:
    """The learning rate is still rising when much of the run is over.

    ## Why is this bad?
    The run spends its steps far below the learning rate you chose, and has none left for the decay. If the total
    number of steps is not declared (`hyperparameters`), only a very long rise is reported, as information.

    ## Example
    fires: train/lr{0} 1e-6+1e-6x400 | facts/total_steps 1000
    quiet: train/lr{0} 1e-6+1e-6x100 1e-4x300 | facts/total_steps 1000
    """
    severity, least = _longest_warm_up(settings, info)
    if lr.at < least or len(lr) < 2 or not (lr.values[-1] > lr.values[-2]).any():
        return
    rises = lr.values[1:] > lr.values[:-1]
    for group in np.flatnonzero(rises.all(axis=0)):
        yield finding(severity, lr.at, least, lr.scopes[group], lr=float(lr.last[group]))


@dataclass(frozen=True, slots=True, kw_only=True)
class LrNeverDecays(Settings):
    """When `lr-never-decays` fires."""

    share: float = between(0.9, 0.0, 1.0)
    """Fraction of the declared total steps by which the rate should have started to fall."""
    tolerance: float = between(0.01, 0.0, 1.0)
    """Minimum fall, as a fraction of the peak, that counts as a start."""


def _near_the_end(settings: LrNeverDecays, info: RunInfo) -> Gate:
    since = settings.share * declared(info, "total_steps")
    return Since(since - 1)


def _at_a_peak(metric: str, upcoming: Upcoming, settings: LrNeverDecays, info: RunInfo) -> Bools | None:
    lr = upcoming.joined(metric)
    if lr is None:
        return None
    is_high = any_of(lr.values >= (1 - settings.tolerance) * np.array(declared_peaks(lr, info)))
    return is_high[-len(upcoming.columns[metric].steps) :]


@rule(
    "U111", "lr-never-decays", reads=("train/lr", "train/lr_plan"), per_scope=True, keep=1000,
    gate=_near_the_end,
    lookahead=lambda settings, info: lambda metric, upcoming: _at_a_peak(metric, upcoming, settings, info),
    settings=LrNeverDecays,
    message=Message(
        "The learning rate has not decayed near the end of the run",
        "learning rate {value} · expected below {bound} · total steps {total_steps} · group {group}",
    ),
    remedies=(
        advise("decay_lr", "Decay the learning rate to a tenth or less by the end",
               "much of the drop in the loss comes with the decay", shape="cosine"),
    ),
)  # fmt: skip
def lr_never_decays(lr: Panel, plan: Panel, settings: LrNeverDecays, info: RunInfo) -> Iterator[Finding]:
    """The learning rate is still at its peak when the run is about to end.

    ## Why is this bad?
    At a high rate the weights keep jumping around a minimum. A decay lets them settle, and usually lowers the loss by
    more than the same number of steps at the peak. This is only information, since some runs do it on purpose. A
    group whose plan keeps the peak does not fire.

    ## Example
    fires: train/lr{0} 1e-3x950 | facts/total_steps 1000
    quiet: train/lr{0} 1e-3x500 5e-4x450 | facts/total_steps 1000
    quiet: train/lr{0} 1e-3x950 | train/lr_plan{0} 1e-3x950 | facts/total_steps 1000
    """
    total = declared(info, "total_steps")
    if not lr.at + 1 >= settings.share * total:
        return
    peaks = np.array(peak_rates(lr, info))
    bound = (1 - settings.tolerance) * peaks
    for group in np.flatnonzero((lr.last >= bound) & ~(_planned(lr, plan) >= bound)):
        if peaks[group] > 0:
            yield finding(Severity.INFO, lr.last[group], bound[group], lr.scopes[group], total_steps=total)


def _planned(lr: Panel, plan: Panel) -> Floats:
    """The planned rate of each group at the latest step; NaN without a plan."""
    is_planned = len(plan) and plan.at == lr.at and plan.scopes == lr.scopes
    return plan.last.astype(np.float64) if is_planned else np.full(len(lr.scopes), np.nan)


@dataclass(frozen=True, kw_only=True)
class LrThresholds(Settings):
    """The settings of the rules in this file, by the name of the rule."""

    lr_off_plan: LrOffPlan = LrOffPlan()
    lr_jump_on_resume: LrJumpOnResume = LrJumpOnResume()
    lr_spent: LrSpent = LrSpent()
    warm_up_without_end: WarmUpWithoutEnd = WarmUpWithoutEnd()
    lr_never_decays: LrNeverDecays = LrNeverDecays()
