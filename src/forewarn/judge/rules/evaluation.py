"""Rules about what the epochs bring: the validation loss beside the training loss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from forewarn.judge.epochs import gap, improvement, is_plateau
from forewarn.judge.lr_course import has_decayed, is_rising, peak_rate, rates
from forewarn.judge.registry import found, rule
from forewarn.judge.remedies import (
    add_data,
    add_parameters,
    advise,
    clip_gradient,
    decay_lr,
    declared,
    deepen,
    lower_lr,
    plan_steps,
    raise_dropout,
    raise_lr,
    raise_weight_decay,
    roll_back,
    stop_early,
    train_longer,
    warm_up,
    widen,
)
from forewarn.judge.series import Floats, Panel, Series
from forewarn.thresholds.evaluation import (
    FirstEpochFlat,
    FirstEpochSpike,
    Overfitting,
    ScheduleMismatch,
    SlowImprovement,
    Underfitting,
    ValidationPlateau,
    ValidationRising,
)
from forewarn.types import Finding, RunInfo, Severity

_LOSSES = ("evaluation/train_loss", "eval/loss")
_SCALE = "train/loss_level"
"""What the highest loss of the run is read from: by it a loss is near zero or not."""


@rule(
    "E101", "overfitting", reads=(*_LOSSES, _SCALE), keep=1, explains=("E103", "E104"),
    remedies=(raise_dropout(), raise_weight_decay(), stop_early(), add_data()),
)  # fmt: skip
def overfitting(train: Series, validation: Series, level: Series, config: Overfitting) -> Finding | None:
    """Training loss that still falls while the validation loss, far above it, does not.

    ## Why is this bad?
    The model learns its training samples by heart, and every further epoch makes it better at them alone. A large gap
    by itself is information: it is overfitting once the validation loss no longer improves on its best while the
    training loss gains 5% or more.

    ## Example
    fires: 3.5 2.1 1.2 0.8 | eval/loss 3.6 2.8 2.6 2.7
    quiet: 3.5 2.1 1.2 0.8 | eval/loss 3.6 2.8 2.6 2.4
    quiet: 3.2 2.1 2.0 1.98 | eval/loss 3.5 2.8 2.7 2.68
    """
    epochs = _Epochs.of(train, validation)
    if len(epochs) < 2 or _is_negligible(epochs.validation, level, config.negligible_share):
        return None
    share = gap(epochs.train[-1], epochs.validation[-1])
    learnt = improvement(*epochs.train[-2:])
    gained = improvement(min(epochs.validation[:-1]), epochs.validation[-1])
    if not (share > config.gap and learnt >= config.training_gain and gained <= config.improvement):
        return None
    return found(
        Severity.WARNING, share, config.gap, train_loss=epochs.train[-1], val_loss=epochs.validation[-1],
        training_gain=learnt, improvement=gained,
    )  # fmt: skip


@rule(
    "E102", "slow-improvement", reads=(*_LOSSES, _SCALE, "train/lr"), when=_LOSSES[:1], per_scope=True, keep=1,
    explains=("E103",),
    remedies=(
        lower_lr(1 / 3, "after fast gains both losses stall: the steps are too large for what is left to learn"),
        decay_lr(),
    ),
)  # fmt: skip
def slow_improvement(
    train: Panel, validation: Panel, level: Panel, lr: Panel, config: SlowImprovement, info: RunInfo
) -> Finding | None:
    """Both losses stall soon after an epoch of large gains.

    ## Why is this bad?
    A healthy run slows down over many epochs. One that gains 15% in an epoch and next to nothing a little later has met
    a limit, most often a learning rate that was good for the beginning and is too high for the rest: the weights jump
    around what they should settle into. Where the learning rate has decayed already it is quiet.

    ## Example
    fires: 3.2 2.1 2.0 1.98 | eval/loss 3.5 2.8 2.7 2.68
    quiet: 4.5 4.2 4.0 3.9 | eval/loss 4.6 4.4 4.2 4.1
    quiet: 3.5 2.1 1.2 0.8 | eval/loss 3.6 2.8 2.6 2.7
    quiet: 3.2 2.1 2.0 1.98 | eval/loss 3.5 2.8 2.7 2.68 | train/lr{0} 1e-3x3 1e-4
    """
    epochs = _Epochs.of(Series(train), Series(validation))
    if len(epochs) < 3 or _is_negligible(epochs.validation, Series(level), config.negligible_share):
        return None
    *earlier, gained = epochs.improvements()
    learnt = improvement(*epochs.train[-2:])
    fastest = max(earlier[-config.epochs :])
    if not (gained < config.improvement and learnt < config.training_gain and fastest > config.earlier_gain):
        return None
    rises = gained < -config.improvement  # a loss that rises does not improve slowly
    if rises or has_decayed(lr, config.decayed_share, info):
        return None
    return found(
        Severity.WARNING, gained, config.improvement, training_gain=learnt, earlier_gain=fastest,
        val_loss=epochs.validation[-1],
    )  # fmt: skip


@rule(
    "E103", "validation-plateau", reads=("eval/loss", "evaluation/epoch", _SCALE, "train/lr"), per_scope=True, keep=1,
    remedies=(
        lower_lr(1 / 3, "at a lower learning rate a loss that stands still often falls again"), decay_lr(),
        stop_early(),
    ),
)  # fmt: skip
def validation_plateau(
    validation: Panel, epoch: Panel, level: Panel, lr: Panel, config: ValidationPlateau, info: RunInfo
) -> Finding | None:
    """Validation loss that stands still, for three epochs or for 10,000 steps.

    ## Why is this bad?
    Time is spent and nothing is gained. With a high learning rate a lower one may help; where it has decayed, the run
    is over, and that is information.

    ## Example
    fires: 3.0 2.0 2.0 2.01 | evaluation/epoch 1+1x4
    quiet: 3.0 2.0 1.9 1.85 | evaluation/epoch 1+1x4
    quiet: 3.0 2.0 2.0 2.01
    """
    losses = Series(validation)
    readings = losses.finite()
    if len(readings) < 2 or not math.isfinite(losses.last):
        return None
    if _is_negligible(readings, Series(level), config.negligible_share):
        return None
    severity = Severity.INFO if has_decayed(lr, config.decayed_share, info) else Severity.WARNING
    _, at, _ = np.intersect1d(losses.steps, Series(epoch).steps, return_indices=True)
    by_epoch = [float(each) for each in losses.values[at] if math.isfinite(each)]
    if len(at) and losses.steps[at[-1]] == losses.at and is_plateau(by_epoch, config.change, config.window):
        largest = max(abs(improvement(*pair)) for pair in pairwise(by_epoch[-config.window :]))
        return found(severity, largest, config.change, val_loss=losses.last, epochs=config.window)
    best = int(losses.steps[np.nanargmin(np.where(np.isfinite(losses.values), losses.values, np.nan))])
    if losses.at - best >= config.steps:
        return found(severity, losses.at - best, config.steps, val_loss=losses.last, best=readings.min())
    return None


@rule(
    "E104", "validation-rising", reads=("eval/loss", _SCALE), keep=1,
    remedies=(
        stop_early(), roll_back("the weights from before it rose are better on unseen samples"),
        lower_lr(1 / 3), raise_dropout(), raise_weight_decay(),
    ),
)  # fmt: skip
def validation_rising(validation: Series, level: Series, config: ValidationRising) -> Finding | None:
    """Validation loss more than 10% above its best.

    ## Why is this bad?
    What the run has learnt since then is worth less than nothing on samples that it has not seen: it overfits, or it
    diverges, which the training loss tells. One evaluation is information, two in a row are a warning.

    ## Example
    fires: 3.0 2.0 2.5 2.6
    quiet: 3.0 2.0 2.1 2.1
    quiet: 3.0 0.01 0.02 0.03
    """
    losses = validation.finite()
    if len(losses) < 2 or not math.isfinite(validation.last):
        return None
    best = np.minimum.accumulate(losses)[:-1]
    above = losses[1:] > best + config.rise * np.abs(best)
    if not above[-1] or _is_negligible(losses, level, config.negligible_share):
        return None
    lasting = len(above) if above.all() else int(np.argmin(above[::-1]))
    began = int(validation.steps[np.isfinite(validation.values)][-lasting])
    severity = Severity.WARNING if lasting >= config.lasting else Severity.INFO
    return found(
        severity, losses[-1], best[-1] + config.rise * abs(best[-1]), best=best[-1], evaluations=lasting,
        lasting_steps=validation.at - began + 1,
    )  # fmt: skip


@rule(
    "E105", "underfitting", reads=_LOSSES, keep=1,
    remedies=(
        widen(), deepen(), add_parameters(), train_longer(),
        raise_lr(3.0, "if it is not the model that is too small, the steps may be"),
    ),
)  # fmt: skip
def underfitting(train: Series, validation: Series, config: Underfitting) -> Finding | None:
    """Both losses fall slowly and together.

    ## Why is this bad?
    It is information: the model fits the samples that it sees no better than those that it does not, and no epoch has
    gained it 10%. Either it is too small for the task, or it needs more time.

    ## Example
    fires: 4.5 4.2 4.0 3.9 | eval/loss 4.6 4.4 4.2 4.1
    quiet: 3.2 2.1 2.0 1.98 | eval/loss 3.5 2.8 2.7 2.68
    quiet: 4.5 4.2 4.0 3.9 | eval/loss 5.6 5.4 5.2 5.1
    """
    epochs = _Epochs.of(train, validation)
    if len(epochs) < config.epochs or not epochs.since_the_first:
        return None
    gains = [improvement(*pair) for pair in pairwise(epochs.train)]
    share = gap(epochs.train[-1], epochs.validation[-1])
    if not (share < config.gap and all(0 < gain < config.training_gain for gain in gains)):
        return None
    return found(
        Severity.INFO, max(gains), config.training_gain, gap=share, train_loss=epochs.train[-1],
        val_loss=epochs.validation[-1],
    )  # fmt: skip


@rule(
    "E106", "first-epoch-flat", reads=("evaluation/end_loss", "evaluation/start_loss", "train/lr"), per_scope=True,
    keep=1, explains=("E102", "E103", "E105"),
    remedies=(
        raise_lr(10.0, "after an epoch the loss is where it was: the steps are too small"),
        advise("inspect_labels", "from labels that do not belong to the inputs nothing can be learnt"),
    ),
)  # fmt: skip
def first_epoch_flat(end: Panel, start: Panel, lr: Panel, config: FirstEpochFlat) -> Finding | None:
    """Training loss that an epoch has barely moved from where it started.

    ## Why is this bad?
    The first epoch is the one that teaches most. If it has taught nothing, the learning rate is too low, or there is
    nothing to learn from. While the learning rate still rises it is waited for.

    ## Example
    fires: _x299 4.60 | evaluation/start_loss _x299 4.61 | train/lr{0} 1e-7x300
    quiet: _x299 4.10 | evaluation/start_loss _x299 4.61 | train/lr{0} 1e-7x300
    quiet: _x299 4.60 | evaluation/start_loss _x299 4.61 | train/lr{0} 1e-7+1e-7x300
    """
    last, first = Series(end), Series(start)
    if first.at != last.at or last.at < config.steps or is_rising(lr, last.at // 2):
        return None
    moved = improvement(first.last, last.last)
    if not -config.rise < moved < config.gain:
        return None
    return found(
        Severity.WARNING, moved, config.gain, start_loss=first.last, end_loss=last.last, lasting_steps=last.at + 1
    )


@rule(
    "E107", "first-epoch-spike", reads=("evaluation/peak_loss", "evaluation/start_loss", "evaluation/end_loss"),
    keep=1, explains=("L102", "L103", "L104", "L106", "G102", "G104", "E102", "E103", "E104"),
    remedies=(
        lower_lr(0.1, "the loss rose above where it started: the first steps are far too large"), warm_up(),
        clip_gradient(),
    ),
)  # fmt: skip
def first_epoch_spike(peak: Series, start: Series, end: Series, config: FirstEpochSpike) -> Finding | None:
    """Training loss that an epoch has driven above where the run started.

    ## Why is this bad?
    Weights at random are a better model than what the run has made of them: the learning rate is far too high for the
    beginning, or there is no warm-up. Where the loss has come down again by the end of the epoch it is information.

    ## Example
    fires: _x99 6.5 | evaluation/start_loss _x99 4.61 | evaluation/end_loss _x99 4.7
    quiet: _x99 4.7 | evaluation/start_loss _x99 4.61 | evaluation/end_loss _x99 3.1
    """
    if not len(peak) or not start.at == end.at == peak.at or not start.last > 0:
        return None
    ratio = peak.last / start.last
    if not ratio > config.factor:
        return None
    recovered = improvement(start.last, end.last) > config.recovery
    lost = end.last > config.critical_factor * start.last
    severity = Severity.INFO if recovered else Severity.CRITICAL if lost else Severity.WARNING
    return found(
        severity, peak.last, config.factor * start.last, start_loss=start.last, end_loss=end.last, ratio=ratio,
        lasting_steps=peak.at + 1,
    )  # fmt: skip


@rule(
    "E108", "schedule-mismatch", reads=("evaluation/epoch", "train/lr"), per_scope=True, keep=1,
    remedies=(plan_steps(), advise("check_stepping", "a scheduler made for epochs must not step with every batch")),
)  # fmt: skip
def schedule_mismatch(epoch: Panel, lr: Panel, config: ScheduleMismatch, info: RunInfo) -> Finding | None:
    """Learning-rate schedule that does not end with the training.

    ## Why is this bad?
    A schedule that ends early leaves epochs without learning; one that is made for a longer run never comes to the
    small steps at its end, where much of the loss is won. Seen by the declared `total_steps` and `epochs`: the steps
    that the epochs take are others than planned, the run goes on after the plan, or the learning rate has come to its
    end long before the run has, or not at all (which is information).

    ## Example
    fires: _x49 5 | train/lr{0} 1e-3x20 1e-6x30 | facts/epochs 10
    fires: _x49 5 | train/lr{0} 1e-3x50 | facts/epochs 10 | facts/total_steps 1000
    fires: _x49 5 | train/lr{0} 1e-3x50 | facts/total_steps 30
    quiet: _x49 5 | train/lr{0} 1e-3x50 | facts/epochs 10 | facts/total_steps 100
    quiet: _x49 5 | train/lr{0} 1e-3x20 1e-6x30
    """
    count = Series(epoch).last
    if not count > 0:
        return None
    done = epoch.at + 1
    planned, epochs = declared(info, "total_steps"), declared(info, "epochs")
    needed = done / count * epochs
    expected = needed if math.isnan(planned) or abs(planned - needed) > config.tolerance * needed else planned
    steps_needed = round(done if math.isnan(expected) else max(done, expected))
    if not math.isnan(planned) and expected != planned:
        return found(Severity.WARNING, planned, expected, epochs=epochs, epochs_done=count, steps_needed=steps_needed)
    if done > (1 + config.tolerance) * planned:
        return found(Severity.WARNING, done, planned, epochs_done=count, steps_needed=steps_needed)
    if not len(lr) or is_rising(lr, 0):
        return None
    seen = rates(lr)
    now, peak = float(seen[-1]), peak_rate(lr, info)
    above = np.flatnonzero(seen > config.floor * peak)
    ended = int(lr.steps[above[-1]]) + 1 if len(above) else int(lr.steps[0])
    left = 1 - ended / expected
    if ended < done and left > config.left:
        return found(Severity.WARNING, now, config.floor * peak, ended=ended, left=left, steps_needed=steps_needed)
    if done >= expected and config.open_end * peak < now < (1 - config.floor) * peak:
        return found(Severity.INFO, now, config.open_end * peak, peak=peak, steps_needed=steps_needed)
    return None


@dataclass(frozen=True, slots=True)
class _Epochs:
    """The epochs for which both losses are known, oldest first."""

    train: list[float]
    validation: list[float]
    since_the_first: bool

    @classmethod
    def of(cls, train: Series, validation: Series) -> _Epochs:
        """Empty unless the newest epoch has both: nothing is said about old readings."""
        steps, ours, theirs = np.intersect1d(train.steps, validation.steps, return_indices=True)
        if not len(steps) or steps[-1] != train.at or train.at != validation.at:
            return cls([], [], False)
        pairs = np.stack([train.values[ours], validation.values[theirs]]).astype(np.float64)
        if not np.isfinite(pairs[:, -1]).all():
            return cls([], [], False)
        ours, theirs = pairs[:, np.isfinite(pairs).all(axis=0)]
        return cls(ours.tolist(), theirs.tolist(), bool(steps[0] == train.steps[0]))

    def __len__(self) -> int:
        return len(self.train)

    def improvements(self) -> list[float]:
        """Of the validation loss, from each epoch to the next."""
        return [improvement(*pair) for pair in pairwise(self.validation)]


def _is_negligible(losses: Sequence[float] | Floats, level: Series, share: float) -> bool:
    """Whether the newest of these losses is near zero, by the highest of them and of the training loss."""
    return bool(losses[-1] <= share * max(*losses, *level.finite()))
