"""Rules about a training loss that has stopped falling, or never fell."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from forewarn.judge.headlines import Message
from forewarn.judge.lr_course import has_decayed, is_rising
from forewarn.judge.objective import is_objective
from forewarn.judge.registry import NOT_JUDGED, finding, rule
from forewarn.judge.remedies import advise, clip_gradient, decay_lr, for_cause, lower_lr, raise_lr, warm_up, widen
from forewarn.judge.rules.updates import lr_factor, typical_ratios
from forewarn.judge.series import MAD_TO_STD, Floats, Panel, Series, Steps, median, middle
from forewarn.settings import Settings, between
from forewarn.types import Finding, RunInfo, Severity, Values

_MOST_POINTS = 64
"""Maximum number of levels that a slope is fitted to; if there are more, every n-th is used."""
_LEVEL_ERROR = 1.2533 / math.sqrt(32)
"""The standard error of the median of 32 losses, relative to their standard deviation."""
_SLOPE_ERROR = math.sqrt(12)
"""The standard error of a fitted fall is this times that of one point, divided by the root of their number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossNotStarting(Settings):
    """When `loss-not-starting` fires."""

    gain: float = between(0.02, 0.0, 1.0)
    """Minimum steady fall over the run, as a fraction of the first loss."""
    first_fall: float = between(0.1, 0.0, 1.0)
    """Minimum fall from the first loss, as a fraction of it: a smaller one may only fit the scale of the output."""
    significance: float = between(2.0, 0.0)
    """Standard errors of the slope added to the fall as a margin for noise, before it is compared with `gain`."""
    levels: int = between(6, 4, counts="readings")
    """Minimum number of loss levels; one level is the median of 32 steps."""
    settled_steps: int = between(190, 1, counts="steps")
    """Steps without a rise of the lr before the rule can fire, so that it waits for the end of a warm-up; half of the
    run if that is less."""
    slow: float = between(5e-5, 0.0)
    """Largest median update ratio so far below which the rule does not wait as long: the learning rate is to blame."""
    slow_levels: int = between(3, 2, counts="readings")
    """Minimum number of loss levels then."""
    slow_steps: int = between(90, 1, counts="steps")
    """Steps without a rise of the lr then."""
    wanted: float = between(2e-2, 0.0)
    """Update ratio that the first remedy aims at then: that of Adam's first steps at its default learning rate of 1e-3,
    in layers of about 100 inputs."""
    moving: float = between(3e-4, 0.0)
    """Largest median update ratio so far above which the weights move enough, so that the data or the model is to
    blame."""
    usual: float = between(0.8, 0.0, 1.0)
    """Quantile of the median update ratios so far that is compared with it: the first steps of RMSprop are its
    largest."""
    large: float = between(1e-2, 0.0)
    """Median update ratio above which the learning rate may be too high."""
    tiny: float = between(1e-5, 0.0)
    """Median update ratio below which a slow fall of the loss counts as none either."""
    tiny_gain: float = between(0.05, 0.0, 1.0)
    """Minimum steady fall, as a fraction of the first loss, if the steps are that small."""
    chance: float = between(0.97, 0.0, 1.0)
    """Fraction of ln(number of classes) above which a softmax loss is no better than chance."""
    far: float = between(1e3, 0.0)
    """First loss above which the targets may be too far away for the usual steps."""
    constant: float = between(1e-3, 0.0)
    """Robust standard deviation of the loss, as a fraction of it, below which it is the same for every batch."""


_USUAL_START = LossNotStarting()
"""Made once: checking settings takes longer than the rule that uses these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossPlateau(Settings):
    """When `loss-plateau` fires."""

    gain: float = between(0.01, 0.0, 1.0)
    """Minimum fall over the second half of the run, as a fraction of the loss; in proportion for part of that half."""
    significance: float = between(2.0, 0.0)
    """Standard errors of the slope added to the fall as a margin for noise, before it is compared with `gain`."""
    levels: int = between(12, 4, counts="readings")
    """Minimum number of loss levels in the second half; one level is the median of 32 steps."""
    decayed_share: float = between(0.3, 0.0, 1.0)
    """Fraction of its peak below which the lr counts as decayed: the loss may flatten then."""
    negligible_share: float = between(0.05, 0.0, 1.0)
    """Fraction of its highest level below which the loss counts as near zero, with nothing left to gain."""


@rule(
    "L104", "loss-plateau", reads=("train/loss_level", "train/lr", "train/loss", "update/separate_losses"),
    when=("train/loss_level",), per_scope=True, hold=2, keep=256,
    settings=LossPlateau,
    message=Message(
        "The training loss has stopped falling",
        "loss {level} · fall {value} in {lasting_steps} steps · expected at least {bound}",
    ),
    remedies=(
        lower_lr(1 / 3, "a loss that is stuck at a high learning rate often falls at a lower one"),
        decay_lr(), widen(),
        advise("stop", "Stop the run if this loss is good enough", "more steps are unlikely to lower it"),
    ),
)  # fmt: skip
def loss_plateau(
    level: Panel, lr: Panel, loss: Panel, separate: Panel, settings: LossPlateau, info: RunInfo
) -> Finding | None:
    """The training loss has not fallen for half of the run.

    ## Why is this bad?
    Healthy training slows down, but in proportion to what is left. From the middle of a run to its end the loss falls
    by a few percent, however long the run is. A loss that does not is stuck. Most often the steps are too large, or the
    model is too small to fit more.

    The rule fits a Theil–Sen slope to the medians of 32 steps over the second half. It fires only if even the steepest
    slope that the noise allows is too small. So a noisy loss that may be improving does not fire. Neither does a loss
    near zero, a run whose learning rate is still rising, or one whose learning rate has decayed. A loss that never fell
    is reported by `loss-not-starting` instead. A loss that is not the objective need not fall.

    ## Example
    fires: 5.0 4.0-0.1x20 2.0x30 | train/lr{0} 1e-3x51
    quiet: 5.0 4.0-0.1x20 2.0-0.01x30 | train/lr{0} 1e-3x51
    quiet: 5.0 4.0-0.1x20 2.0x30 | train/lr{0} 1e-3x30 1e-4x21
    quiet: 5.0 4.0-0.2x20 0.1x30 | train/lr{0} 1e-3x51
    """
    steps, levels = _finite(level.series())
    begin = len(levels) // 2
    if len(levels) - begin < settings.levels or not is_objective(loss.series(), separate.series(), info):
        return NOT_JUDGED
    recent, since = levels[begin:], steps[begin:]
    now = middle(recent[-settings.levels // 2 :])
    if now <= settings.negligible_share * levels.max():
        return None
    slope = theil_sen(since, recent)
    span = float(since[-1] - since[0])
    error = settings.significance * _fall_error(since, recent, slope)
    steepest = -slope * span + error
    half = max(1.0, (int(steps[-1]) + 1) / 2)  # memory may hold less than half of a very long run
    bound = settings.gain * min(1.0, span / half) * now
    if not (now > 0 and error < 2 * bound):  # with a larger error nothing can be concluded
        return NOT_JUDGED
    if steepest >= bound:
        return None
    if has_decayed(lr, settings.decayed_share, info) or is_rising(lr, int(since[0])):
        return NOT_JUDGED
    if _not_started(
        level.series(), _USUAL_START, _USUAL_START.levels, _USUAL_START.gain, info
    ):  # it needs a higher lr, not a lower one
        return NOT_JUDGED
    return finding(
        Severity.WARNING, steepest, bound, level=now, fall=-slope * span, lasting_steps=int(steps[-1] - since[0])
    )


def _stays_near_the_first(levels: Floats, settings: LossNotStarting, info: RunInfo) -> bool:
    if len(levels) < 2:
        return False
    first_fall = min(settings.first_fall, settings.gain) if info.start_is_averaged else settings.first_fall
    now = middle(levels[1:][-settings.levels // 2 :])
    return bool(levels[0] - now < first_fall * abs(levels[0]))


@rule(
    "L105", "loss-not-starting",
    reads=("train/loss_level", "train/lr", "train/loss", "update/separate_losses", "update/ratio",
           "batch/num_classes", "monitor/update_ratio_median"),
    when=("train/loss_level",), per_scope=True, keep=256,
    gate=lambda settings, info: lambda _step, _level, history: (
        _stays_near_the_first(_finite(history.series("train/loss_level"))[1], settings, info)
    ),
    explains=("L104", "L106", "G103", "G107", "U103", "A101", "A104", "T101", "T102", "E102", "E103", "E105", "E106"),
    settings=LossNotStarting,
    message=(
        Message(
            "The training loss has barely moved since the start",
            "first loss {first} · now {level} · after {lasting_steps} steps",
            "the learning rate is too low: a step changes the weights by {slow_ratio} of their size",
        ),
        Message(
            "The training loss has barely moved since the start",
            "first loss {first} · now {level} · after {lasting_steps} steps",
            "the weights do move, by {moving_ratio} of their size per step: the inputs may not belong to their labels",
        ),
        Message(
            "The training loss has barely moved since the start",
            "first loss {first} · now {level} · after {lasting_steps} steps",
            "the targets are so far from the outputs that steps of {far_ratio} of the weights do not get there",
        ),
        Message(
            "The training loss has barely moved since the start",
            "first loss {first} · now {level} · after {lasting_steps} steps",
            "the weights move far in each step, by {large_ratio} of their size, but the loss does not fall",
        ),
        Message(
            "The training loss has barely moved since the start",
            "first loss {first} · now {level} · after {lasting_steps} steps · standard deviation {spread}",
            "it is the same for every batch, so it does not depend on the labels",
        ),
        Message(
            "The training loss has barely moved since the start",
            "first loss {first} · now {level} · after {lasting_steps} steps",
        ),
    ),
    remedies=(
        for_cause("slow", raise_lr(10.0, "a first step of about 2% of the weight norm trains well", of_peak=True)),
        for_cause("large", lower_lr(0.1, "the weights move far in each step, but the loss does not fall")),
        for_cause("far", advise(
            "normalize_targets", "Scale the targets to a mean of 0 and a standard deviation of 1",
            "the outputs of a new model are about 1; or set the last bias to the mean of the targets",
        )),
        for_cause("moving", advise(
            "inspect_labels", "Check that each label belongs to its input", "a model cannot learn from shuffled labels"
        )),
        for_cause("constant", advise(
            "check_objective", "Check the targets that the loss gets: label smoothing, masks and the reduction",
            "a loss that is the same for every batch has nothing to teach",
        )),
        for_cause("unknown", raise_lr(10.0, "most often the learning rate is too low", of_peak=True)),
        advise("overfit_one_batch", "Try to overfit one batch",
               "a model that cannot memorize one batch has a bug that no learning rate fixes"),
        for_cause("unknown", advise(
            "inspect_labels", "Check that each label belongs to its input", "a model cannot learn from shuffled labels"
        )),
        for_cause("moving", raise_lr(10.0, "the steps may still be too small", of_peak=True)),
    ),
)  # fmt: skip
def loss_not_starting(
    level: Panel,
    lr: Panel,
    loss: Panel,
    separate: Panel,
    ratios: Panel,
    classes: Panel,
    medians: Panel,
    settings: LossNotStarting,
    info: RunInfo,
) -> Finding | None:
    """The training loss has barely moved from its first value.

    ## Why is this bad?
    The model has not learned anything yet. If the weights hardly move either, the learning rate is too low. Otherwise
    the inputs say nothing about the targets (shuffled labels, a wrong mask), or the learning rate is so high that every
    step undoes the one before. The rule waits for the end of a warm-up, and while noise may hide a fall.

    A loss of thousands or millions often means targets that were not normalized, such as prices: a new model returns
    about 1, and its steps are made for that.

    A model that learns nothing still finds the scale of the targets. So a fall within the first steps counts only from
    10% of the first loss. A loss that is not the objective, as in a GAN, need not fall while the weights move.

    How far a step moves the weights tells the two cases apart. If it is almost nothing, the rule does not wait as long.
    Otherwise the loss must be no better than chance, the same for every batch, or without any trend: a loss with a high
    floor falls by little, and part of a loss may rise by design, as in a VQ-VAE.

    ## Example
    fires: 4.6 _x280 4.6x20 | train/lr{0} 1e-7x301
    fires: 4.6 _x280 4.6x20 | update/ratio{a.weight} 1e-3x301 | train/loss 4.5+0.001x301 | batch/num_classes 100x301
    fires: 4.6 _x280 4.6x20 | train/lr{0} 1e-3x301 | train/loss 4.6x301
    fires: 4e8 _x280 4e8x20 | update/ratio{a.weight} 1e-3x301 | train/loss 4e8+1e5x301
    fires: 4.6 _x95 4.6x4 | train/lr{0} 1e-7x100 | update/ratio{a.weight} 1e-6x100
    quiet: 4.6 _x95 4.6x4 | train/lr{0} 1e-3x100 | update/ratio{a.weight} 1e-3x100
    fires: 4.6 _x280 4.6-0.016x20 | train/lr{0} 1e-7x301 | update/ratio{a.weight} 1e-6x301
    fires: 4.6 _x280 4.6x20 | train/lr{0} 1.0x301 | update/ratio{a.weight} 0.02x301
    quiet: 4.6 _x280 4.6-0.016x20 | train/lr{0} 1e-3x301 | update/ratio{a.weight} 1e-3x301
    quiet: 4.6 _x280 4.6-0.02x20 | train/lr{0} 1e-3x301
    quiet: 9.0 _x280 4.6x20 | train/lr{0} 1e-3x301
    quiet: 4.6 _x280 4.6x20 | train/lr{0} 1e-7+1e-7x301
    """
    typical = typical_ratios(ratios, info)
    forgotten = _forgotten(ratios, medians.series(), settings)
    largest = float(np.fmax.reduce(typical, initial=forgotten))
    is_slow = largest < settings.slow
    settled = settings.slow_steps if is_slow else settings.settled_steps
    if level.at < settled or is_rising(lr, level.at - min(settled, level.at // 2)):
        return None
    if not is_slow and not is_objective(loss.series(), separate.series(), info):
        return None
    gain = settings.tiny_gain if largest < settings.tiny else settings.gain
    least = settings.slow_levels if is_slow else settings.levels
    stuck = _not_started(level.series(), settings, least, gain, info)
    if stuck is None:
        return None
    recent = loss.series().values[-_MOST_POINTS:]
    num_classes = classes.series().median(_MOST_POINTS)
    at_chance = num_classes > 1 and median(recent) > settings.chance * math.log(num_classes)
    is_constant = len(recent) > 0 and _spread(recent) < settings.constant * median(recent)
    large = np.fmax(median(typical), forgotten)
    is_without_trend = _is_without_trend(level.series(), recent, settings, may_rise=large >= settings.large)
    if not (is_slow or at_chance or is_constant or is_without_trend):
        return None
    evidence: dict[str, float | str] = {"cause": "unknown"}
    if is_constant and not is_slow:
        evidence = {"cause": "constant", "spread": _spread(recent)}
    elif (usual := _usual(typical, forgotten, settings)) < settings.moving:
        evidence = {"cause": "slow", "slow_ratio": usual, "lr_factor": lr_factor(settings.wanted, usual)}
    elif large >= settings.large:
        evidence = {"cause": "large", "large_ratio": float(large)}
    elif largest >= settings.moving and float(stuck.evidence["first"]) >= settings.far:
        evidence = {"cause": "far", "far_ratio": median(typical)}
    elif largest >= settings.moving:
        evidence = {"cause": "moving", "moving_ratio": median(typical)}
    return dataclasses.replace(stuck, evidence={**stuck.evidence, **evidence})


def _usual(typical: Floats, forgotten: float, settings: LossNotStarting) -> float:
    """A large median ratio, but not the largest: without a bias correction the first steps are ten times too large."""
    finite = typical[np.isfinite(typical)]
    return float(np.fmax(np.quantile(finite, settings.usual), forgotten)) if len(finite) else forgotten


def _forgotten(ratios: Panel, medians: Series, settings: LossNotStarting) -> float:
    """The largest median ratio before the ratios in memory, if it was large: a learning rate that has decayed since
    then, or has killed the model, was not too low. NaN if there was none.
    """
    if not len(ratios):
        return math.nan
    early = medians.values[medians.steps < ratios.steps[0]]
    highest = float(np.fmax.reduce(early, initial=math.nan))
    return highest if highest >= settings.large else math.nan


def _is_without_trend(level: Series, recent: Values, settings: LossNotStarting, *, may_rise: bool) -> bool:
    """Whether the noise hides any fall. A loss with a high floor falls by little, but surely.

    A few levels may lie on a line by chance, so the noise of the single losses counts as well. A sure rise is a trend
    too, unless the steps are so large that they cause it: part of a loss may grow by design, such as the distance
    between an encoder and its codebook. Rules about a rising loss judge it.
    """
    steps, levels = _finite(level)
    slope = theil_sen(steps[1:], levels[1:])
    fall = -slope * float(steps[-1] - steps[1])
    of_level = _LEVEL_ERROR * _spread(recent) if len(recent) else 0.0
    error = max(_fall_error(steps[1:], levels[1:], slope), _SLOPE_ERROR * of_level / math.sqrt(len(levels) - 1))
    margin = settings.significance * error
    return levels[0] > 0 and fall <= margin and (may_rise or -fall <= max(margin, settings.gain * levels[0]))


def _not_started(level: Series, settings: LossNotStarting, least: int, gain: float, info: RunInfo) -> Finding | None:
    """What `loss-not-starting` finds with at least this many levels, whatever the learning rate does.

    The slope shows a steady fall; a fall within the first steps shows only in the very first loss.
    """
    steps, levels = _finite(level)
    if len(levels) <= least or int(level.steps[0]) > info.first_step:
        return None
    if not _stays_near_the_first(levels, settings, info):
        return None
    first, since, rest = float(levels[0]), steps[1:], levels[1:]
    slope = theil_sen(since, rest)
    error = settings.significance * _fall_error(since, rest, slope)
    fall = -slope * float(since[-1] - since[0])
    bound = gain * abs(first)
    now = middle(rest[-settings.levels // 2 :])
    if not (bound > 0 and fall + error < bound and error < 2 * bound):
        return None
    return finding(
        Severity.WARNING, fall + error, bound, first=first, level=now, fall=fall, lasting_steps=int(since[-1]) + 1,
        cause="small_steps",
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class LossBouncing(Settings):
    """When `loss-bouncing` fires."""

    steps: int = between(256, 32, counts="steps")
    """Number of recent steps to judge."""
    readings: int = between(32, 8, counts="readings")
    """Minimum number of losses among them: where fewer were logged, more steps are judged."""
    correlation: float = between(0.3, 0.0, 1.0)
    """Correlation of successive losses, of either sign, from which the spread is more than batch noise."""
    spread: float = between(0.1, 0.0)
    """Robust standard deviation, as a fraction of the loss level, above which the loss bounces."""
    gain: float = between(0.05, 0.0, 1.0)
    """Minimum fall from the first half of these steps to the second, as a fraction, to count as progress."""
    negligible_share: float = between(0.05, 0.0, 1.0)
    """Fraction of the highest level of the run below which bouncing does not matter."""
    warning_share: float = between(0.5, 0.0, 1.0)
    """Fraction of the highest level from which it is a warning: below, the order of the data may be the cause."""


@rule(
    "L106", "loss-bouncing", reads=("train/loss", "train/loss_level", "train/lr", "update/separate_losses"),
    when=("train/loss_level",), per_scope=True, hold=2, keep=128,
    explains=("L102", "L104", "G104", "E102", "E103", "E104"),
    settings=LossBouncing,
    message=Message(
        "The training loss bounces and makes no progress",
        "standard deviation {value} · limit {bound} · loss {level} · last {lasting_steps} steps",
    ),
    remedies=(
        lower_lr(1 / 3, "each step overshoots, and smaller steps can settle"), warm_up(), clip_gradient(),
        advise("enlarge_batch", "Make the batch {factor}× as large", "a gradient over more samples is less noisy",
               factor=2),
    ),
)  # fmt: skip
def loss_bouncing(
    loss: Panel, level: Panel, lr: Panel, separate: Panel, settings: LossBouncing, info: RunInfo
) -> Finding | None:
    """The training loss goes up and down by more than batch noise and makes no progress.

    ## Why is this bad?
    The steps are too large: the next steps lose what some steps gain. Most often the learning rate is too high. Batch
    noise is independent from step to step. A loss that bounces keeps its direction, or reverses it every time.

    A loss that still makes progress does not fire, nor does one near zero. Far below the first loss it is only
    information, since unshuffled data looks the same. So is the bouncing of a loss that is not the objective, as in
    reinforcement learning or a GAN.

    ## Example
    fires: 2.0x32 3.0x32 2.0x32 3.0x32 2.0x32 3.0x32 2.0x32 3.0x32 2.0x32 | train/loss_level 2.0x288
    quiet: 2.0x300 | train/loss_level 2.0x300
    quiet: 9.0-0.02x300 | train/loss_level 9.0-0.02x300
    """
    readings = loss.series()
    num_readings = max(readings.readings_in(settings.steps), settings.readings)
    recent = readings.values[-num_readings:]
    if len(recent) < num_readings or not np.isfinite(recent[-1]):
        return None
    earlier, later = median(recent[: num_readings // 2]), median(recent[num_readings // 2 :])
    if not later > (1 - settings.gain) * earlier:
        return None
    spread = _spread(recent)  # what most often tells comes first
    if not spread > settings.spread * later or is_rising(lr, int(readings.steps[-num_readings])):
        return None
    highest = max(earlier, later, _finite(level.series())[1].max(initial=-math.inf))
    correlation = _correlation(recent)
    if not later > settings.negligible_share * highest or abs(correlation) < settings.correlation:
        return None
    harmless = later < settings.warning_share * highest or not is_objective(readings, separate.series(), info)
    severity = Severity.INFO if harmless else Severity.WARNING
    lasting = max(settings.steps, readings.steps_of(num_readings))
    return finding(
        severity, spread, settings.spread * later, level=later, correlation=correlation, lasting_steps=lasting
    )


def theil_sen(steps: Steps, values: Floats) -> float:
    """The median slope between all pairs of points, which tolerates up to 29% of outliers."""
    every = max(1, math.ceil(len(steps) / _MOST_POINTS))
    x, y = steps[::-every].astype(np.float64), values[::-every]
    later, before = _pairs(len(x))
    return middle((y.take(later) - y.take(before)) / (x.take(later) - x.take(before)))


@lru_cache(maxsize=_MOST_POINTS)
def _pairs(num_points: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """The indices of the later and the earlier point of every pair."""
    later, before = np.tril_indices(num_points, -1)
    return later, before


def _finite(level: Series) -> tuple[Steps, Floats]:
    keep = np.isfinite(level.values)
    return level.steps[keep], level.values[keep].astype(np.float64)


def _fall_error(steps: Steps, levels: Floats, slope: float) -> float:
    """The standard error of the fall over all these levels that the slope implies."""
    return _SLOPE_ERROR * _residual(levels, slope, steps) / math.sqrt(len(levels))


def _residual(levels: Floats, slope: float, steps: Steps) -> float:
    """The robust standard deviation of the levels around their slope."""
    rest = levels - slope * steps
    return MAD_TO_STD * middle(np.abs(rest - middle(rest)))


def _correlation(values: Values) -> float:
    """The correlation of each value with the one before it."""
    clean = values[np.isfinite(values)].astype(np.float64)
    rest = clean - clean.mean() if len(clean) else clean
    power = float(rest @ rest)
    return float(rest[1:] @ rest[:-1]) / power if 0 < power < math.inf else 0.0


def _spread(values: Values) -> float:
    clean = values[np.isfinite(values)].astype(np.float64)
    return MAD_TO_STD * middle(np.abs(clean - middle(clean)))


@dataclass(frozen=True, kw_only=True)
class LossLevelThresholds(Settings):
    """The settings of the rules in this file, by the name of the rule."""

    loss_plateau: LossPlateau = LossPlateau()
    loss_not_starting: LossNotStarting = LossNotStarting()
    loss_bouncing: LossBouncing = LossBouncing()
