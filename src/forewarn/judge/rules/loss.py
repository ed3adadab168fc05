"""Rules about the training loss."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import numpy as np

from forewarn.judge.headlines import Message
from forewarn.judge.lr_course import declared_peak, rates
from forewarn.judge.objective import is_objective
from forewarn.judge.registry import NOT_FINITE, finding, rule
from forewarn.judge.remedies import (
    advise,
    clip_gradient,
    for_cause,
    lower_beta2,
    lower_lr,
    roll_back,
    skip_batch,
    snapshot,
    stop,
    warm_up,
)
from forewarn.judge.series import MAD_TO_STD, Bools, Panel, Series, Steps, median, nanmedian, trailing
from forewarn.judge.spike import Spike
from forewarn.judge.upcoming import NEARLY, Upcoming, never
from forewarn.settings import Settings, between
from forewarn.types import Finding, RunInfo, Severity, Values

_MEDIAN_ERROR = 1.2533
"""The standard error of a median relative to that of a mean, for normal noise: sqrt(pi / 2)."""

_QUARTILES = 0.25, 0.75
"""Most values of a window lie above the first, and most lie below the second."""


@rule(
    "L101", "non-finite-loss", reads=("train/loss",), keep=50,
    gate=lambda _settings, _info: NOT_FINITE,
    explains=("G101", "W101", "M101"),
    message=Message("The training loss is NaN or infinite", "loss {value} · last finite loss {last_finite}"),
    remedies=(
        for_cause("start", advise(
            "find_operation", "Run the first step under `torch.autograd.detect_anomaly()`",
            "no batch has worked so far, so the model, its input or the loss is to blame, not one batch",
        )),
        for_cause("infinite", advise(
            "find_operation", "Find the logarithm, division or exponential in the loss that is infinite at step {step}",
            "the loss was finite until then: a small epsilon or `clamp` keeps its argument away from zero",
        )),
        for_cause("batch", skip_batch()),
        roll_back(),
        advise("inspect_batch", "Look at the batch of step {step}",
               "an empty, corrupt or out-of-range sample can make the loss NaN"),
        lower_lr(0.5, "if the loss rose before this, the steps were too large"),
        snapshot(),
    ),
)  # fmt: skip
def non_finite_loss(loss: Series, info: RunInfo) -> Finding | None:
    """The training loss is NaN or infinite.

    ## Why is this bad?
    Its gradients are not finite either, and one optimizer step with them destroys every weight they reach. The run
    cannot recover unless that step is skipped. If this is the first alert, the cause is a bad batch, or an operation in
    the loss such as the logarithm of zero, which makes it infinite rather than NaN. Otherwise the loss or the gradients
    grew until the forward pass overflowed.

    ## Example
    fires: 2.0x5 nan
    fires: 2.0x5 inf
    quiet: 2.0-0.1x6
    quiet: 2.0x5 1e30
    """
    if not len(loss) or math.isfinite(loss.last):
        return None
    lost = trailing(~np.isfinite(loss.values))
    never_finite = lost == len(loss) and int(loss.steps[0]) <= info.first_step
    cause = "start" if never_finite else "infinite" if np.isinf(loss.values[-lost]) else "batch"
    return finding(Severity.CRITICAL, loss.last, 0.0, last_finite=_last_finite(loss), cause=cause)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSpike(Spike):
    """When `loss-spike` fires."""

    warning_factor: float = between(10.0, 1.0)
    """Times the recent level at which a single step is a warning."""
    critical_factor: float = between(100.0, 1.0)
    """Times the recent level at which a single step is critical."""
    lasting_steps: int = between(3, 1, counts="steps")
    """Steps in a row after which a spike of any height is a warning."""
    lost_steps: int = between(20, 1, counts="steps")
    """Steps in a row after which the spike is critical: the loss is not coming back."""
    negligible_share: float = between(0.2, 0.0, 1.0)
    """Fraction of the highest loss so far below which a spike is only information."""
    rounding: float = between(0.01, 0.0, 1.0)
    """Minimum drop assumed for a negative loss, as a fraction of its level: bfloat16 rounding alone can cause it."""


def _upcoming_spikes(metric: str, upcoming: Upcoming, settings: LossSpike) -> Bools | None:
    """Which of the upcoming losses are above their usual level, or if losses can be negative, their spread."""
    outliers, loss = upcoming.outliers(metric, settings), upcoming.joined(metric)
    if outliers is None or loss is None:
        return None
    losses = loss.values[-len(outliers) - settings.window :, 0].astype(np.float64)
    if not np.fmin.reduce(losses) < 0:
        return outliers
    if len(losses) < len(outliers) + settings.window or not np.isfinite(losses).all():
        return None
    before = np.lib.stride_tricks.sliding_window_view(losses[:-1], settings.window)
    middles = np.median(before, axis=1)
    reach = settings.k * MAD_TO_STD * np.median(np.abs(before - middles[:, None]), axis=1)
    excess = losses[settings.window :] - middles
    return outliers | (excess > NEARLY * reach)


@rule(
    "L102", "loss-spike", reads=("train/loss", "train/loss_level", "update/separate_losses"), when=("train/loss",),
    keep=50,
    gate=lambda settings, _info: lambda _step, _loss, history: (
        (baseline := history.baseline("train/loss", settings)).lasting > 0 or baseline.saw_negative(settings.window)
    ),
    lookahead=lambda settings, _info: lambda metric, upcoming: _upcoming_spikes(metric, upcoming, settings),
    explains=("L101", "G102", "G104"),
    settings=LossSpike,
    message=(
        Message(
            "The training loss is {ratio:×} its usual level",
            "loss {value} · limit {bound} · usual {level}",
        ),
        Message(
            "The training loss is far above its usual level",
            "loss {value} · limit {bound} · usual {level}",
        ),
    ),
    remedies=(skip_batch(), lower_lr(0.5), clip_gradient(), lower_beta2(), roll_back()),
)  # fmt: skip
def loss_spike(loss: Series, levels: Series, separate: Series, settings: LossSpike, info: RunInfo) -> Finding | None:
    """The training loss is far above its recent level.

    ## Why is this bad?
    The weights left the region where the loss was low. The cause is a bad batch, a learning rate at the edge of
    stability, or the start of a divergence. A single step is information, and a high or lasting spike is a warning. A
    spike that does not come back is critical: the run is lost. On an almost solved task, the loss jumps by large
    factors at levels too small to matter; that is only information.

    Ratios mean nothing for a loss that can be negative, such as a log-likelihood or an ELBO. There, the spread of the
    recent losses decides what a spike is, and the height is measured against what the run has gained so far. A loss
    that is not the objective, as in reinforcement learning or a GAN, has no level: its spikes are only information.

    ## Example
    fires: 2.0+0.001x150 9.0 9.0
    fires: -2.0-0.001x150 5.0 5.0
    quiet: 2.0+0.001x151
    quiet: 9.0-0.05x150 1.6 1.7 1.6
    quiet: 3.0-0.05x150 -4.1 -4.0 -4.1
    """
    if np.fmin.reduce(loss.values[-settings.window :], initial=0.0) < 0:
        spike = _spike_by_spread(loss, levels, settings)
    else:
        spike = _spike_by_ratio(loss, levels, settings)
    if spike is not None and not is_objective(loss, separate, info):
        return dataclasses.replace(spike, severity=Severity.INFO)
    return spike


def _spike_by_ratio(loss: Series, levels: Series, settings: LossSpike) -> Finding | None:
    """A spike of a positive loss: far above its usual level on a log scale."""
    deviation = loss.deviation(settings)
    if not deviation.outlier:
        return None
    ratio, lasting = deviation.ratio, loss.steps_of(deviation.lasting)
    highest = max(loss.finite()[:-1].max(), levels.finite().max(initial=0.0))
    if deviation.value < settings.negligible_share * highest:
        severity = Severity.INFO
    elif ratio > settings.critical_factor or lasting > settings.lost_steps:
        severity = Severity.CRITICAL
    elif ratio > settings.warning_factor or lasting >= settings.lasting_steps:
        severity = Severity.WARNING
    else:
        severity = Severity.INFO
    return finding(
        severity, deviation.value, deviation.bound, level=deviation.level, ratio=ratio, lasting_steps=lasting
    )


def _spike_by_spread(loss: Series, levels: Series, settings: LossSpike) -> Finding | None:
    """A spike of a loss that can be negative: `k` robust deviations above the median of the recent losses.

    Heights are compared with the run's gain, from its highest loss down to this level, instead of the level itself. A
    spike must exceed `floor` times that gain. The median and the spread tolerate a minority of outliers. A loss that
    stays high becomes the new level.
    """
    recent = loss.finite(settings.window + 1)
    before, value = recent[:-1], loss.last
    if len(before) < settings.minimum or not math.isfinite(value):
        return None
    level = float(np.median(before))
    highest = max(loss.finite()[:-1].max(), levels.finite().max(initial=-math.inf))
    gained = max(highest - level, settings.rounding * abs(level))
    reach = max(settings.k * MAD_TO_STD * float(np.median(np.abs(before - level))), settings.floor * gained)
    excess = value - level
    if not excess > reach or not gained > 0:
        return None
    below = np.flatnonzero(recent <= level + reach)
    lasting = loss.steps_of(len(recent) - 1 - int(below[-1]))
    if excess < settings.negligible_share * gained:
        severity = Severity.INFO
    elif excess > settings.critical_factor * gained or lasting > settings.lost_steps:
        severity = Severity.CRITICAL
    elif excess > settings.warning_factor * gained or lasting >= settings.lasting_steps:
        severity = Severity.WARNING
    else:
        severity = Severity.INFO
    return finding(severity, value, level + reach, level=level, gained=gained, lasting_steps=lasting)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossDivergence(Settings):
    """When `loss-divergence` fires."""

    window: int = between(32, 8, counts="readings")
    """Number of losses in one window. The median must rise over two windows in a row, and within the last one."""
    slow_window: int = between(128, 8, counts="readings")
    """The same, for rises too slow to stand out from the noise in the shorter windows."""
    significance: float = between(3.0, 0.0)
    """Standard errors by which the median must rise from window to window; half as many within the last one."""
    factor: float = between(1.5, 1.0)
    """Times the best earlier level above which a rising loss is a warning."""
    critical_factor: float = between(3.0, 1.0)
    """Times the best earlier level above which a rising loss is critical."""
    comparable_lr: float = between(0.5, 0.0, 1.0)
    """Minimum lr at an earlier level, as a fraction of the current lr; ignored while the current lr is a new peak."""


def _upcoming_rises(metric: str, upcoming: Upcoming, settings: LossDivergence) -> Bools | None:
    """Where the median of the upcoming losses rises and is far above the lowest of them and of those in memory."""
    loss = upcoming.joined(metric)
    if loss is None:
        return None
    bound = settings.factor * np.float64(np.fmin.reduce(loss.values[:, 0]))
    diverging = never(metric, upcoming)
    if not np.fmax.reduce(loss.values[:, 0]) > bound:
        return diverging
    for window in (settings.window, settings.slow_window):
        rolling = upcoming.rolling_medians(metric, window)
        if rolling is None:
            return None
        medians, is_rising = rolling
        diverging |= is_rising & (medians > bound)
    return diverging


@rule(
    "L103", "loss-divergence", reads=("train/loss", "train/lr", "update/separate_losses"), when=("train/loss",),
    per_scope=True, hold=16, keep=100,
    gate=lambda settings, _info: lambda _step, _loss, history: (
        history.is_rising("train/loss", settings.window) or history.is_rising("train/loss", settings.slow_window)
    ),
    lookahead=lambda settings, _info: lambda metric, upcoming: _upcoming_rises(metric, upcoming, settings),
    explains=("L101", "L102", "L107", "L108", "E107", "G102", "G104", "A104", "A108", "M102", "M103"),
    settings=LossDivergence,
    message=Message(
        "The training loss keeps rising",
        "loss {value} · limit {bound} · best {best} ({lasting_steps} steps ago)",
    ),
    remedies=(lower_lr(0.5), roll_back(), clip_gradient(), warm_up(), snapshot(), stop()),
)  # fmt: skip
def loss_divergence(loss: Panel, lr: Panel, separate: Panel, settings: LossDivergence, info: RunInfo) -> Finding | None:
    """The training loss is well above its best level and keeps rising.

    ## Why is this bad?
    A loss that climbs for a hundred steps is not noise: the model is getting worse. Most often the learning rate is
    too high, for example at the end of a warm-up or after the data changed. Such a loss seldom recovers by itself.

    To rule out noise and single jumps, the loss must rise over two windows in a row and within the newest one. Most of
    the newest window must also lie above most of the best earlier one. Earlier levels count only if the learning rate
    was comparable. So a restart of the schedule, which gives up some of the loss on purpose, does not fire. If the loss
    is not the objective, as in reinforcement learning or a GAN, this is only information.

    ## Example
    fires: 2.0x200 2.0+0.02x150
    quiet: 2.0x200 6.0x10 2.0x150
    quiet: 2.0x200 2.0+0.1x16 3.6x150
    """
    readings = loss.series()
    for window in (settings.window, settings.slow_window):
        diverging = _divergence(readings, lr, window, settings, info)
        if diverging is not None:
            is_meant = is_objective(readings, separate.series(), info)
            return diverging if is_meant else dataclasses.replace(diverging, severity=Severity.INFO)
    return None


def is_solved(loss: Panel, levels: Panel, share: float) -> bool:
    """Whether the latest loss is below this share of the highest in memory, so nothing is left to learn.

    False if unknown. The levels reach much further back than the individual losses.
    """
    losses = loss.series()
    highest = np.fmax.reduce(np.append(losses.finite(), levels.series().finite()), initial=0.0)
    return bool(losses.last < share * highest)


def _divergence(loss: Series, lr: Panel, window: int, settings: LossDivergence, info: RunInfo) -> Finding | None:
    """Divergence over windows of this many losses. Cheap tests come first, since most steps fail them."""
    values = loss.values
    if len(values) < 4 * window:
        return None
    medians = loss.rolling_median(window)
    if not medians.is_rising():
        return None
    level = medians.at(0)
    if not level > settings.factor * np.float64(np.fmin.reduce(values)):
        return None
    oldest, middle, newest = values[-3 * window :].reshape(3, window)
    if not (_rise(middle, newest) > settings.significance and _rise(oldest, middle) > settings.significance):
        return None
    if not _rise(newest[: window // 2], newest[window // 2 :]) > settings.significance / 2:
        return None
    blocks = values[len(values) % window : -window].reshape(-1, window)
    steps = loss.steps[len(values) % window : -window].reshape(-1, window)
    levels = np.where(comparable(lr, steps, loss.at, settings.comparable_lr, info), nanmedian(blocks.T), np.nan)
    if np.isnan(levels).all():
        return None
    best_window = int(np.nanargmin(levels))
    best = float(levels[best_window])
    lower, upper = _QUARTILES
    apart = _quantile(newest, lower) > _quantile(blocks[best_window], upper)
    if not (best > 0 and level > settings.factor * best and apart):
        return None
    severity = Severity.CRITICAL if level > settings.critical_factor * best else Severity.WARNING
    return finding(
        severity, level, settings.factor * best, best=best, ratio=level / best,
        lasting_steps=loss.at - int(steps[best_window, -1]),
    )  # fmt: skip


def comparable(lr: Panel, windows: Steps, step: int, share: float, info: RunInfo) -> Bools:
    """For each window of steps: whether the lr in it and in the previous one was at least `share` of the current lr.

    If the current lr is above all earlier ones, every level counts.
    """
    earlier = rates(lr, windows.ravel()).reshape(windows.shape)
    current = float(rates(lr, np.array([step]))[0])
    peak = np.fmax.reduce(earlier, axis=None, initial=declared_peak(info))
    if not current <= peak:
        return np.ones(len(windows), np.bool_)
    low: Bools = np.logical_or.reduce(earlier < share * current, axis=1)
    return ~(low | np.append(low[:1], low[:-1]))


def _rise(before: Values, after: Values) -> float:
    """How much the median has risen from one window to the next, in standard errors."""
    level, earlier = median(after), median(before)
    spread = max(median(np.abs(after - level)), median(np.abs(before - earlier))) * MAD_TO_STD
    error = _MEDIAN_ERROR * spread * math.sqrt(1 / len(before) + 1 / len(after))
    risen = level - earlier
    return risen / error if error > 0 else math.copysign(math.inf, risen) if risen else 0.0


def _quantile(values: Values, share: float) -> float:
    """The finite value below which this share of the finite values lies; NaN if there is none."""
    finite = np.sort(values[np.isfinite(values)])
    return float(finite[int(share * (len(finite) - 1))]) if len(finite) else math.nan


def _last_finite(series: Series) -> float:
    finite = series.finite()
    return float(finite[-1]) if len(finite) else math.nan


@dataclass(frozen=True, kw_only=True)
class LossThresholds(Settings):
    """The settings of the rules in this file, by the name of the rule."""

    loss_spike: LossSpike = LossSpike()
    loss_divergence: LossDivergence = LossDivergence()
