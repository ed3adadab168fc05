"""Rules about a training loss that has left its level for good: upwards, past its start, or below any limit."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from forewarn.judge.headlines import Message
from forewarn.judge.history import History
from forewarn.judge.lr_course import rates
from forewarn.judge.objective import is_game, is_objective
from forewarn.judge.registry import Gate, finding, rule
from forewarn.judge.remedies import advise, for_cause, lower_lr, restore_lr, roll_back, snapshot, warm_up
from forewarn.judge.rules.loss import comparable
from forewarn.judge.series import Bools, Floats, Panel, Series, median
from forewarn.judge.upcoming import Upcoming, never
from forewarn.settings import Settings, between
from forewarn.types import Finding, Remedy, RunInfo, Severity

_LEVEL_LOSSES = 32
"""Number of losses whose median is one level."""
_LOWER_QUARTILE = 0.25
"""Most losses lie above it."""
_AROUND = 8
"""Number of losses on either side of a rise that are compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossShift(Settings):
    """When `loss-shift` fires."""

    lost: float = between(0.25, 0.0, 1.0)
    """Fraction of the run's gain, from its highest to its best level, that the loss must have given up."""
    rise: float = between(0.1, 0.0)
    """Fraction of its best level by which the loss must have risen as well."""
    fallen: float = between(0.2, 0.0)
    """Fraction of its best level by which the loss must have fallen before: little gained is little lost."""
    critical: float = between(0.9, 0.0)
    """Fraction of the gain that is critical: almost nothing of it is left."""
    comparable_lr: float = between(0.5, 0.0, 1.0)
    """Minimum lr at an earlier level, as a fraction of the current lr; ignored while the current lr is a new peak."""
    sudden: float = between(0.5, 0.0, 1.0)
    """Fraction of the rise within a few steps from which it was sudden, so that something must have changed there."""
    raised: float = between(1.5, 1.0)
    """Multiple of the lr of a few steps earlier from which a rise of the lr is what changed there."""
    first_losses: int = between(16, 2, counts="readings")
    """Number of losses in a row above all of the 32 before them after which a sudden rise need not wait for a level."""
    leap: float = between(0.25, 0.0)
    """Fraction of its best level by which the loss must have risen then, if that is less than `lost` of the gain: a
    loss that starts far above chance gains most in its first steps."""
    negligible_share: float = between(0.05, 0.0, 1.0)
    """Fraction of the highest level below which only `lost` counts: the task is almost solved."""


def _inspect_data(finding: Finding, history: History, info: RunInfo) -> Remedy:
    """Look at the data of the step at which the loss rose, which is earlier than the one at which it was seen."""
    step = int(finding.evidence.get("rose_at", finding.step))
    return Remedy(
        "inspect_data", {"step": step},
        "labels that no longer belong to their inputs, sorted data or another source lift the loss at once",
        do=f"Check what changed in the data around step {step}",
    )  # fmt: skip


def _above_the_best(settings: LossShift, _info: RunInfo) -> Gate:
    def is_above(_step: int, newest: float, history: History) -> bool:
        best = history.newest("train/loss_level").lowest
        return not newest <= best + settings.rise * max(best, 0.0)

    return is_above


def _upcoming_leaps(metric: str, upcoming: Upcoming, settings: LossShift) -> Bools | None:
    """Where the newest of the upcoming losses lie above all before them; not known if steps are repeated."""
    loss, num_new = upcoming.joined(metric), len(upcoming.columns[metric].steps)
    if metric != "train/loss" or loss is None or loss.scopes != ("",):
        return None
    level_at = upcoming.history.panel("train/loss_level").at
    if level_at >= loss.steps[-num_new] or (np.diff(loss.steps[-num_new:]) <= 0).any():
        return None
    leaps, window = never(metric, upcoming), _LEVEL_LOSSES + settings.first_losses
    losses = loss.values[-num_new - window + 1 :, 0]
    if len(losses) >= window:
        recent = np.lib.stride_tricks.sliding_window_view(losses, window)
        earlier, newest = recent[:, :_LEVEL_LOSSES], recent[:, _LEVEL_LOSSES:]
        leaps[window - len(losses) - 1 :] = newest.min(axis=1) > earlier.max(axis=1)
    return leaps


@rule(
    "L107", "loss-shift",
    reads=("train/loss_level", "train/loss", "train/lr", "update/separate_losses", "batch/repeated"),
    when=("train/loss_level", "train/loss"), per_scope=True, keep=256,
    gate=_above_the_best,
    lookahead=lambda settings, _info: lambda metric, upcoming: _upcoming_leaps(metric, upcoming, settings),
    explains=("L102", "L103", "L106", "G102", "G104", "U102", "U104", "E104"),
    settings=LossShift,
    message=(
        Message(
            "The training loss has risen to a new level",
            "loss {value} · limit {bound} · best {best} · gain lost {lost:%}",
            "it rose suddenly around step {rose_at}, when the learning rate went from {lr_before} to {lr_after}",
        ),
        Message(
            "The training loss has risen to a new level",
            "loss {value} · limit {bound} · best {best} · gain lost {lost:%}",
            "it rose suddenly around step {rose_at}, at the same learning rate of {steady_lr}: most likely the data, "
            "its labels or the mode of a layer changed there",
        ),
        Message(
            "The training loss has risen to a new level",
            "loss {value} · limit {bound} · best {best} · gain lost {lost:%}",
            "it rose suddenly around step {rose_at}, while all {same_batches} measured batches were the same: most "
            "likely the steps have become too large",
        ),
        Message(
            "The training loss has risen to a new level",
            "loss {value} · limit {bound} · best {best} · gain lost {lost:%}",
            "it rose around step {rose_at}",
        ),
    ),
    remedies=(
        for_cause("lr", restore_lr()),
        for_cause("steps", lower_lr(0.3, "the batch is always the same, so the data cannot have lifted the loss")),
        _inspect_data,
        roll_back(),
        for_cause("unknown", lower_lr(0.3, "if the data is the same, the steps have become too large")),
        snapshot(),
    ),
)  # fmt: skip
def loss_shift(
    levels: Panel, loss: Panel, lr: Panel, separate: Panel, repeated: Panel, settings: LossShift, info: RunInfo
) -> Finding | None:
    """The training loss has risen well above its best level and stays there.

    ## Why is this bad?
    The run has lost part of what it had gained. It is not a spike, which comes back, and need not be a trend: most
    often something changed from one step to the next. The labels or their order, the source of the data, the mode of a
    layer and the learning rate are the usual suspects.

    The newest median of 32 losses is compared with the best earlier one, whatever the shape of the rise. Earlier levels
    count only if the learning rate was comparable. Most of the newest losses must lie above the best level. A rise from
    one step to the next need not last that long: 16 losses above all of the 32 before them are enough, if the learning
    rate has not risen. On a full batch, which is the same in every step, it is the steps that have become too large.
    If the loss is not the objective, as in reinforcement learning or a GAN, this is only information.

    ## Example
    fires: 5.0 3.0 2.0 1.5 1.2 2.5 | train/loss 2.5x32
    fires: 5.0 _x31 3.0 _x31 1.2 _x31 | train/loss 3.0x33 1.2x46 2.5x16 | train/lr{0} 1e-3x95
    fires: 5.0 _x31 3.0 _x31 1.2 _x31 | train/loss 3.0x33 1.2x46 2.5x16 | batch/repeated 1x95
    quiet: 5.0 _x31 3.0 _x31 1.2 _x31 | train/loss 3.0x33 1.2x47 2.5x15 | train/lr{0} 1e-3x95
    fires: 5.0 _x63 2.0 _x31 1.2 _x31 2.5 | train/loss 3.0x33 2.0x32 1.2x32 2.5x32 | train/lr{0} 1e-3x129
    fires: 5.0 _x63 2.0 _x31 1.2 _x31 2.5 | train/loss 3.0x33 2.0x32 1.2x32 2.5x32 | train/lr{0} 1e-3x97 1e-2x32
    quiet: 5.0 3.0 2.0 1.5 1.2 1.4 | train/loss 1.4x32
    quiet: 5.0 3.0 1.0 0.01 0.02 | train/loss 0.02x32
    """
    level, is_ahead = levels.series(), levels.at < loss.at
    if is_ahead:
        level = _ahead(level, loss.series(), lr, settings)
    is_finite = np.isfinite(level.values)
    medians, steps = level.values[is_finite].astype(np.float64), level.steps[is_finite]
    if len(medians) < 3 or not math.isfinite(level.last):
        return None
    lowest = float(medians[:-1].min())
    if lowest > 0 and not medians[-1] > lowest + settings.rise * lowest:  # whichever earlier level is the best
        return None
    earlier = np.where(comparable(lr, steps[:-1, None], level.at, settings.comparable_lr, info), medians[:-1], np.nan)
    if np.isnan(earlier).all():
        return None
    now, best_at = float(medians[-1]), int(np.nanargmin(earlier))
    best = float(medians[best_at])
    gain = float(medians[: best_at + 1].max()) - best
    least = settings.lost * gain
    if is_ahead and now > settings.negligible_share * float(medians.max()) and best > 0:
        least = min(least, settings.leap * best)
    bound = best + max(least, settings.rise * abs(best))
    if not (now > bound and gain > settings.fallen * abs(best)):
        return None
    least_low = best if loss.series().cadence == 1 else bound  # losses that were logged now and then make noisy levels
    if not is_ahead and not np.quantile(loss.series().finite(_LEVEL_LOSSES), _LOWER_QUARTILE) > least_low:
        return None
    lost = (now - best) / gain
    severity = Severity.CRITICAL if lost >= settings.critical else Severity.WARNING
    is_meant = is_objective(loss.series(), separate.series(), info)
    if not is_meant:
        severity = Severity.INFO
    last_low = int(steps[medians <= bound][-1])
    rose_at = _onset(loss.series(), last_low, best, 2 * bound - best)
    evidence = {"best": best, "lost": min(lost, 1.0), "lasting_steps": level.at - rose_at + 1, "rose_at": rose_at}
    earlier_step = max(rose_at - round(_AROUND * loss.series().cadence), int(lr.steps[0])) if len(lr) else rose_at
    before, after = rates(lr, np.array([earlier_step, rose_at + 1]))
    is_sudden = _leap(loss.series(), rose_at) > settings.sudden * (now - best)
    if is_ahead and not is_sudden:
        return None
    was_raised = is_sudden and after >= settings.raised * before
    if was_raised:
        evidence |= {"lr_before": before, "lr_after": after}
    elif is_sudden and len(repeated) >= _AROUND and bool((repeated.values > 0).all()):
        evidence["same_batches"] = len(repeated)
    elif is_sudden and after <= before and is_meant:  # a policy changes its own data
        evidence["steady_lr"] = after
    cause = "lr" if was_raised else "steps" if "same_batches" in evidence else "unknown"
    return finding(severity, now, bound, "", **evidence, cause=cause)


def _ahead(level: Series, loss: Series, lr: Panel, settings: LossShift) -> Series:
    """The levels with the median of the newest losses, if these lie above all before them; otherwise none at all."""
    num = settings.first_losses
    recent = loss.values[-num - _LEVEL_LOSSES :].astype(np.float64)
    if len(recent) < num + _LEVEL_LOSSES or not recent[-num:].min() > recent[:-num].max():
        return Series.of([])
    before, after = rates(lr, np.array([int(loss.steps[-num - 1]), loss.at]))
    if after > before:
        return Series.of([])
    newest = np.float32(median(recent[-num:]))
    values = np.append(level.values, newest)[:, None]
    return Panel(("",), np.append(level.steps, loss.at), values).series()


def _leap(loss: Series, step: int) -> float:
    """How much the median of a few losses rose at a step."""
    index = int(np.searchsorted(loss.steps, step))
    return median(loss.values[index : index + _AROUND]) - median(loss.values[max(0, index - _AROUND) : index])


def _onset(loss: Series, last_low: int, low: float, high: float) -> int:
    """The step that best splits the losses around the last low level into a low and a high part, by least squares."""
    span = round(_LEVEL_LOSSES * loss.cadence)
    around = (np.abs(loss.steps - last_low) <= span) & np.isfinite(loss.values)
    values = np.clip(loss.values[around].astype(np.float64), low, high)
    if len(values) < 2:
        return last_low + 1
    counts = np.arange(1, len(values))
    before = np.cumsum(values)[:-1]
    apart = before / counts - (values.sum() - before) / (len(values) - counts)
    split = int(np.argmax(apart**2 * counts * (len(values) - counts))) + 1
    return int(loss.steps[around][split])


@dataclass(frozen=True, slots=True, kw_only=True)
class LossAboveStart(Settings):
    """When `loss-above-start` fires."""

    factor: float = between(3.0, 1.0)
    """Multiple of the first losses above which the loss is far above its start."""
    game_factor: float = between(10.0, 1.0)
    """The same in a game such as a GAN, where a loss of several times its start is common."""
    readings: int = between(8, 1, counts="readings")
    """Number of recent losses whose median is compared."""
    first: int = between(3, 1, counts="readings")
    """Number of first losses; the highest of them is the start."""
    learned: float = between(0.5, 0.0, 1.0)
    """Fraction of the start below which an earlier level shows that the model had learned: `loss-shift` is for that."""


@rule(
    "L108", "loss-above-start", reads=("train/loss_level", "train/loss", "update/separate_losses"),
    when=("train/loss_level",), keep=128,
    explains=("L101", "L102", "L103", "L106", "L107", "G102", "G104", "A104", "A108"),
    settings=LossAboveStart,
    message=Message(
        "The training loss is {ratio:×} as high as at the start",
        "loss {value} · limit {bound} · first loss {start} · above it for {lasting_steps} steps",
    ),
    remedies=(
        lower_lr(0.1, "the model is far worse than its initial weights: the steps are much too large"),
        warm_up(), roll_back(),
    ),
)  # fmt: skip
def loss_above_start(
    levels: Series, loss: Series, separate: Series, settings: LossAboveStart, info: RunInfo
) -> Finding | None:
    """The training loss is several times as high as at the start of the run.

    ## Why is this bad?
    The model is far worse than its random initial weights. No healthy run gets there, so the rule needs no history: it
    can fire after 32 steps. The learning rate is much too high, in a GAN that of one of the two sides. If the loss had
    fallen to half its start before, something else has changed, and `loss-shift` says when.

    In a game the loss must be ten times as high, and it is then a warning. In reinforcement learning a loss that grows
    is only information: it grows with the values.

    ## Example
    fires: 2.0 _x30 30.0 | train/loss 2.0x4 30.0x28
    quiet: 2.0 _x30 5.0 | train/loss 2.0x4 5.0x28
    quiet: 2.0 _x30 2.0 | train/loss 2.0x4 30.0x20 2.0x8
    """
    if len(loss) < settings.readings or math.isnan(levels.last) or levels.steps[0] > info.first_step:
        return None
    start = float(levels.values[0])
    if not start > 0:
        return None
    if loss.steps[0] <= info.first_step:
        start = max(start, float(loss.finite(None)[: settings.first].max(initial=start)))
    is_meant, in_game = is_objective(loss, separate, info), is_game(separate, info)
    bound = start * (settings.game_factor if in_game else settings.factor)
    now = loss.median(settings.readings)
    if not now > bound or (is_meant and levels.finite().min() < settings.learned * start):
        return None
    severity = Severity.INFO if not (is_meant or in_game) else Severity.WARNING
    if is_meant and now > start * settings.game_factor:
        severity = Severity.CRITICAL
    low = loss.steps[loss.values <= start]
    lasting = loss.at - int(low[-1] if len(low) else loss.steps[0])
    return finding(severity, now, bound, start=start, ratio=now / start, lasting_steps=lasting)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossWithoutFloor(Settings):
    """When `loss-without-floor` fires."""

    factor: float = between(2.0, 0.0)
    """Multiple of the first loss by which the loss must have fallen, beyond zero or a negative start."""
    levels: int = between(4, 4, counts="readings")
    """Minimum number of loss levels; one level is the median of 32 steps."""
    explosion: float = between(1000.0, 1.0)
    """Multiple of the first loss that needs no more than one level."""


@rule(
    "L109", "loss-without-floor", reads=("train/loss_level", "train/loss", "update/separate_losses"),
    when=("train/loss_level",), per_scope=True, keep=256,
    explains=(
        "L101", "L102", "G101", "G102", "G104", "G105", "G106", "G107", "U102", "U104", "W102", "A101", "A103", "A104",
        "A106", "A107", "A108", "G110", "G111", "W101", "E101", "E104", "E109",
    ),
    settings=LossWithoutFloor,
    message=Message(
        "The loss falls faster and faster below zero",
        "loss {value} · limit {bound} · first loss {first} · below zero for {lasting_steps} steps",
    ),
    remedies=(
        advise("check_sign", "Check the sign of every term of the loss",
               "a term that is subtracted instead of added, or a loss that is maximized, has no lowest value"),
        roll_back(), snapshot(),
    ),
)  # fmt: skip
def loss_without_floor(
    levels: Panel, loss: Panel, separate: Panel, settings: LossWithoutFloor, info: RunInfo
) -> Finding | None:
    """The training loss falls below zero, faster and faster.

    ## Why is this bad?
    A loss that can always be lowered further teaches nothing: the optimizer found a direction without an end. Usually
    a term has the wrong sign, such as a KL divergence that is subtracted, or the whole loss does: then it is negative
    from the start. A log-likelihood may be negative too, but its fall slows down, and it does not fire.

    ## Example
    fires: 2.0 1.9 1.0 -1.0 -5.0 -12.0 -30.0
    fires: -2.3 -3.0 -9.0 -40.0 -200.0
    quiet: 2.0 1.0 -1.0 -3.0 -4.5 -5.0 -5.2
    quiet: -2.0 -8.0 -12.0 -14.0 -15.0 -15.2
    """
    level = levels.series()
    medians = level.finite()
    if len(medians) < 2 or level.steps[0] > info.first_step or not medians[-1] == level.last < 0 != medians[0]:
        return None
    first = float(medians[0])
    bound = min(first, 0.0) - settings.factor * abs(first)
    if not medians[-1] < bound:
        return None
    if not (medians[-1] < -settings.explosion * abs(first) or _fell_faster(medians, bound, settings)):
        return None
    above = level.steps[level.values >= 0]
    lasting = level.at - int(above[-1]) if len(above) else level.at + 1
    severity = Severity.WARNING if is_objective(loss.series(), separate.series(), info) else Severity.INFO
    return finding(severity, medians[-1], bound, first=first, lasting_steps=lasting)


def _fell_faster(medians: Floats, bound: float, settings: LossWithoutFloor) -> bool:
    """Whether the levels fell faster and faster past this bound at some time: a loss that ends there stays lost."""
    return any(
        medians[end - 1] < bound and _falls_faster(medians[:end], settings) for end in range(len(medians), 0, -1)
    )


def _falls_faster(medians: Floats, settings: LossWithoutFloor) -> bool:
    """Whether the newest level is the lowest, and the last third of them fell further than the one before."""
    third = len(medians) // 3
    if len(medians) < settings.levels or medians[-1] > medians.min():
        return False
    return bool(medians[-third - 1] - medians[-1] > medians[-2 * third - 1] - medians[-third - 1])


@dataclass(frozen=True, kw_only=True)
class LossShiftThresholds(Settings):
    """The settings of the rules in this file, by the name of the rule."""

    loss_shift: LossShift = LossShift()
    loss_above_start: LossAboveStart = LossAboveStart()
    loss_without_floor: LossWithoutFloor = LossWithoutFloor()
