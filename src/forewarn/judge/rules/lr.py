"""Rules about the learning rate of each parameter group, compared with what the schedule should do."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from forewarn.judge.headlines import Message
from forewarn.judge.lr_course import peak_rates
from forewarn.judge.registry import finding, rule
from forewarn.judge.remedies import advise, declared, raise_lr, set_lr
from forewarn.judge.series import Floats, Panel
from forewarn.settings import Settings, between
from forewarn.types import Finding, RunInfo, Severity


@dataclass(frozen=True, slots=True, kw_only=True)
class LrOffPlan(Settings):
    """When `lr-off-plan` fires."""

    tolerance: float = between(0.05, 0.0)
    """Share of the planned rate by which the rate may miss it."""
    negligible: float = between(0.005, 0.0)
    """Share of the highest planned rate by which it may miss it in any case."""


@rule(
    "U107", "lr-off-plan", reads=("train/lr", "train/lr_plan"), per_scope=True, hold=3, keep=20,
    explains=("U102", "U103", "U104", "U109", "U110", "U111"),
    settings=LrOffPlan,
    message=Message(
        "The learning rate is not what was planned",
        "learning rate of group {scope} {value} · planned {bound}",
    ),
    remedies=(
        set_lr("this is what the plan says for this step"),
        advise("check_scheduler", "Check scheduler", "call scheduler.step() once per optimizer step, after it, and restore its state "
               "with the optimizer's"),
    ),
)  # fmt: skip
def lr_off_plan(lr: Panel, plan: Panel, settings: LrOffPlan) -> Iterator[Finding]:
    """Learning rate that is not what was planned for this step.

    ## Why is this bad?
    The run that was planned is not the run that is trained. Usual causes: a scheduler that is stepped once per epoch
    though it was made for steps, or the other way round; one that is stepped twice, or before the optimizer; a resume
    that restored the optimizer and not the scheduler; a total number of steps from an earlier config.

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
    """Times, up or down, that the rate may change over a resume."""


@rule(
    "U108", "lr-jump-on-resume", reads=("monitor/resumed", "train/lr", "train/lr_plan"), per_scope=True, keep=50,
    explains=("L102", "U104", "U107"),
    settings=LrJumpOnResume,
    message=Message(
        "The learning rate changed on resume",
        "learning rate of group {group} {value} · before {lr_before}",
    ),
    remedies=(
        advise("restore_scheduler", "Restore scheduler", "save scheduler.state_dict() in the checkpoint and load it after the "
               "optimizer's: the rate then goes on where it was"),
    ),
)  # fmt: skip
def lr_jump_on_resume(resumed: Panel, lr: Panel, plan: Panel, settings: LrJumpOnResume) -> Finding | None:
    """Learning rate that is another after a resume than before it.

    ## Why is this bad?
    A schedule goes on from where it was. A rate that starts over sends trained weights through the warm-up, or through
    the peak, a second time; one that is lost leaves the run at whatever the config says. The loss curve has a seam.
    What the plan of a group says for this step is no jump.

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
    """Share of its peak below which a learning rate is spent."""
    steps: int = between(50, 1, counts="steps")
    """Steps that a run must go on for after that."""
    going_on: float = between(0.2, 0.0)
    """Share of the steps until then that it must go on for as well: the end of a long run is no mistake."""


@rule(
    "U109", "lr-spent", reads=("train/lr", "train/lr_plan"), per_scope=True, keep=100,
    explains=("L104", "L105", "U101", "U103"),
    settings=LrSpent,
    message=Message(
        "The learning rate has been close to zero for {lasting_steps} steps",
        "learning rate of group {scope} {value} · limit {bound} · peak {peak}",
    ),
    remedies=(
        advise("step_scheduler_per_epoch", "Step scheduler per epoch", "a schedule made for epochs is over after as many batches"),
        advise("lengthen_schedule", "Lengthen schedule", "give the scheduler the number of optimizer steps that the run really takes"),
        raise_lr(1.0, "go on at the rate that the run began with"),
    ),
)  # fmt: skip
def lr_spent(lr: Panel, plan: Panel, settings: LrSpent, info: RunInfo) -> Iterator[Finding]:
    """Training that goes on with a learning rate of next to nothing.

    ## Why is this bad?
    Every further step costs what the others did and changes nothing. The usual cause is a scheduler that was made for
    epochs and is stepped with every batch, or a number of steps that counts something else. The last steps of a
    schedule that ends at zero are quiet: the run must go on for 50 steps, and for a fifth of what it took to get there.
    So is a parameter group whose plan says so while others still learn.

    ## Example
    fires: train/lr{0} 1e-3x100 0x60
    quiet: train/lr{0} 1e-3x100 0x40
    quiet: train/lr{0} 1e-3x1000 0x60
    quiet: train/lr{0} 1e-3x100 0x60 | train/lr{1} 1e-3x160 | train/lr_plan{0} 1e-3x100 0x60 | train/lr_plan{1} 1e-3x160
    """
    peaks = peak_rates(lr, info)
    spent = [rate < settings.share * peak for rate, peak in zip(lr.last.tolist(), peaks, strict=True)]
    if not any(spent):
        return
    meant = _planned(lr, plan) < settings.share * np.array(peaks)
    for group in np.flatnonzero(np.array(spent) & ~(meant & (not all(spent)))):
        alive = np.flatnonzero(lr.values[:, group].astype(np.float64) >= settings.share * peaks[group])
        since = int(lr.steps[alive[-1]]) + 1 if len(alive) else int(lr.steps[0])
        lasting = lr.at - since + 1
        if lasting >= max(settings.steps, settings.going_on * since):
            yield finding(
                Severity.WARNING, lr.last[group], settings.share * peaks[group], lr.scopes[group],
                peak=peaks[group], spent_at=since, lasting_steps=lasting,
            )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUpWithoutEnd(Settings):
    """When `warm-up-without-end` fires."""

    share: float = between(0.3, 0.0, 1.0)
    """Share of the declared total of steps after which a rate that still rises has risen too long."""
    steps: int = between(20000, 1, counts="steps")
    """The same in steps, where no total is declared; this is information."""


@rule(
    "U110", "warm-up-without-end", reads=("train/lr",), per_scope=True, keep=100,
    settings=WarmUpWithoutEnd,
    message=Message(
        "The learning rate is still warming up",
        "step {value} · warm-up expected to end by step {bound} · learning rate of group {scope} {lr}",
    ),
    remedies=(
        advise("shorten_warm_up", "Shorten warm up", "a warm-up is a few hundred to a few thousand steps: check that its length counts "
               "optimizer steps, not examples or tokens"),
    ),
)  # fmt: skip
def warm_up_without_end(lr: Panel, settings: WarmUpWithoutEnd, info: RunInfo) -> Iterator[Finding]:
    """Learning rate that still rises when much of the run is over.

    ## Why is this bad?
    The run spends its steps at rates far below the one that was chosen, and has none left for the decay. Where the
    total number of steps is not declared (`hyperparameters`), only a very long rise is told, as information.

    ## Example
    fires: train/lr{0} 1e-6+1e-6x400 | facts/total_steps 1000
    quiet: train/lr{0} 1e-6+1e-6x100 1e-4x300 | facts/total_steps 1000
    """
    total = declared(info, "total_steps")
    severity, least = (
        (Severity.INFO, settings.steps) if math.isnan(total) else (Severity.WARNING, settings.share * total)
    )
    if lr.at < least or len(lr) < 2 or not (lr.values[-1] > lr.values[-2]).any():
        return
    rises = lr.values[1:] > lr.values[:-1]
    for group in np.flatnonzero(rises.all(axis=0)):
        yield finding(severity, lr.at, least, lr.scopes[group], lr=float(lr.last[group]))


@dataclass(frozen=True, slots=True, kw_only=True)
class LrNeverDecays(Settings):
    """When `lr-never-decays` fires."""

    share: float = between(0.9, 0.0, 1.0)
    """Share of the declared total of steps by which the rate should have begun to fall."""
    tolerance: float = between(0.01, 0.0, 1.0)
    """Share of its peak that it must have fallen by to have begun."""


@rule(
    "U111", "lr-never-decays", reads=("train/lr", "train/lr_plan"), per_scope=True, keep=1000,
    settings=LrNeverDecays,
    message=Message(
        "The learning rate is still at its peak near the end of the run",
        "learning rate of group {scope} {value} · expected below {bound} · last step {total_steps}",
    ),
    remedies=(
        advise("decay_lr", "Decay lr", "let it fall to a tenth or less towards the end of the run: much of the loss is won there",
               shape="cosine"),
    ),
)  # fmt: skip
def lr_never_decays(lr: Panel, plan: Panel, settings: LrNeverDecays, info: RunInfo) -> Iterator[Finding]:
    """Learning rate that is still at its peak when the run is about to end.

    ## Why is this bad?
    At a high rate the weights jump about in the valley that they have found; a decay lets them settle, and usually
    lowers the loss by more than as many steps at the peak. Information: some runs mean it. A group
    whose plan says so is quiet.

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
