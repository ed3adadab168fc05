"""Rules that compare the validation loss and the training loss of each epoch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from forewarn.judge.epochs import is_plateau
from forewarn.judge.headlines import Message
from forewarn.judge.lr_course import has_decayed
from forewarn.judge.registry import finding, rule
from forewarn.judge.remedies import (
    add_data,
    add_parameters,
    advise,
    decay_lr,
    deepen,
    lower_lr,
    raise_dropout,
    raise_lr,
    raise_weight_decay,
    reduce_on_plateau,
    roll_back,
    shrink,
    smooth_labels,
    stop_early,
    train_longer,
    widen,
)
from forewarn.judge.series import Floats, Panel, Series, Steps, aligned, trailing
from forewarn.settings import Settings, between
from forewarn.types import Finding, RunInfo, Severity, gap, improvement

_LOSSES = ("evaluation/train_loss", "eval/loss")
_SCALE = "train/loss_level"
"""Metric with the highest loss of the run, which tells whether a loss is near zero."""
_STEPS = "train/loss"
"""Metric read at every step, which tells how many steps an epoch has."""
_SHORT_EPOCH = 8
"""Number of steps below which an epoch is too short to be judged alone."""
_JOINED_STEPS = 100
"""Number of steps over which short epochs count as one, such as those of training on the full batch."""
_ENOUGH_JOINED = 3
"""Number of such joined epochs from which on they are compared instead of the short ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overfitting(Settings):
    """When `overfitting` fires."""

    gap: float = between(0.3, 0.0)
    """Fraction of the training loss by which the validation loss must exceed it."""
    training_gain: float = between(0.05, 0.0, 1.0)
    """Improvement of the training loss over the epoch, as a fraction, at which it still learns."""
    improvement: float = between(0.0, 0.0, 1.0)
    """Largest improvement of the validation loss on its best that counts as no improvement."""
    negligible_share: float = between(0.05, 0.0, 1.0)
    """Fraction of the highest loss below which a loss is near zero: a solved task has large gaps."""
    unlearned: float = between(0.5, 0.0, 1.0)
    """Fraction of the highest loss above which little was learned for unseen samples, while training is near zero."""


@rule(
    "E101", "overfitting", reads=(*_LOSSES, _SCALE, _STEPS), when=_LOSSES[:1], keep=1,
    explains=("E103", "E104", "E109"),
    settings=Overfitting,
    message=(
        Message(
            "Overfitting: only the training loss still improves",
            "gap {value:%} · limit {bound:%} · training loss {train_loss} · validation loss {val_loss} · "
            "training gain {training_gain:%}",
        ),
        Message(
            "Overfitting: the training samples are memorized",
            "training loss {train_loss} · validation loss {val_loss} · highest loss {highest}",
        ),
    ),
    remedies=(raise_dropout(), raise_weight_decay(), stop_early(), add_data(), smooth_labels(), shrink()),
)  # fmt: skip
def overfitting(
    train: Series, validation: Series, level: Series, loss: Series, settings: Overfitting, info: RunInfo
) -> Finding | None:
    """The training loss still falls while the much higher validation loss does not.

    ## Why is this bad?
    The model memorizes its training samples, and every further epoch makes it better at those alone. A large gap is not
    a fault by itself. It is overfitting once the validation loss no longer improves on its best while the training loss
    gains 5% or more. It is overfitting too if the training loss is near zero and the validation loss still above half
    of where it began.

    ## Example
    fires: 3.5 2.1 1.2 0.8 | eval/loss 3.6 2.8 2.6 2.7
    fires: 3.5 1.1 0.01 0.009 | eval/loss 3.6 2.8 2.7 2.6
    quiet: 3.5 2.1 1.2 0.8 | eval/loss 3.6 2.8 2.6 2.4
    quiet: 3.2 2.1 2.0 1.98 | eval/loss 3.5 2.8 2.7 2.68
    """
    epochs = _Epochs.of(train, validation, loss, info)
    if len(epochs) < 2 or _is_negligible(epochs.validation, level, settings.negligible_share):
        return None
    share = gap(epochs.train[-1], epochs.validation[-1])
    highest = max([*epochs.validation, *epochs.train, *level.finite()])
    near_zero, unlearned = settings.negligible_share * highest, settings.unlearned * highest
    if 0 < epochs.train[-1] <= near_zero and epochs.validation[-1] > unlearned:
        return finding(
            Severity.WARNING, share, settings.gap, train_loss=epochs.train[-1], val_loss=epochs.validation[-1],
            highest=highest,
        )  # fmt: skip
    learnt = improvement(*epochs.train[-2:])
    gained = improvement(min(epochs.validation[:-1]), epochs.validation[-1])
    if not (share > settings.gap and learnt >= settings.training_gain and gained <= settings.improvement):
        return None
    return finding(
        Severity.WARNING, share, settings.gap, train_loss=epochs.train[-1], val_loss=epochs.validation[-1],
        training_gain=learnt, improvement=gained,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowImprovement(Settings):
    """When `slow-improvement` fires."""

    improvement: float = between(0.01, 0.0, 1.0)
    """Improvement of the validation loss over the epoch below which it stalls; a larger rise is no stall."""
    training_gain: float = between(0.05, 0.0, 1.0)
    """Improvement of the training loss over the epoch below which it stalls too."""
    earlier_gain: float = between(0.15, 0.0, 1.0)
    """Improvement of the validation loss in an earlier epoch above which that epoch was fast."""
    epochs: int = between(5, 1, counts="epochs")
    """Number of recent epochs among which there must be a fast one."""
    decayed_share: float = between(0.5, 0.0, 1.0)
    """Fraction of its peak below which the learning rate has decayed: lowering it further no longer helps."""
    negligible_share: float = between(0.05, 0.0, 1.0)
    """Fraction of the highest loss below which nothing is left to gain."""


@rule(
    "E102", "slow-improvement", reads=(*_LOSSES, _SCALE, "train/lr", _STEPS), when=_LOSSES[:1], per_scope=True,
    keep=1,
    explains=("E103",),
    settings=SlowImprovement,
    message=Message(
        "Training and validation loss have both stalled",
        "validation gain {value:%} · expected at least {bound:%} · earlier {earlier_gain:%} · "
        "training gain {training_gain:%}",
    ),
    remedies=(
        lower_lr(1 / 3, "after fast gains, a stall in both losses means that the steps are too large"),
        decay_lr(), reduce_on_plateau(),
    ),
)  # fmt: skip
def slow_improvement(
    train: Panel, validation: Panel, level: Panel, lr: Panel, loss: Panel, settings: SlowImprovement, info: RunInfo
) -> Finding | None:
    """Both losses stall soon after an epoch of large gains.

    ## Why is this bad?
    A healthy run slows down over many epochs. A run that gains 15% in one epoch and almost nothing soon after has hit a
    limit. Usually the learning rate was good for the start and is too high for the rest: the weights jump around their
    target and never settle. The rule is quiet once the learning rate has decayed.

    ## Example
    fires: 3.2 2.1 2.0 1.98 | eval/loss 3.5 2.8 2.7 2.68
    quiet: 4.5 4.2 4.0 3.9 | eval/loss 4.6 4.4 4.2 4.1
    quiet: 3.5 2.1 1.2 0.8 | eval/loss 3.6 2.8 2.6 2.7
    quiet: 3.2 2.1 2.0 1.98 | eval/loss 3.5 2.8 2.7 2.68 | train/lr{0} 1e-3x3 1e-4
    """
    epochs = _Epochs.of(train.series(), validation.series(), loss.series(), info)
    if len(epochs) < 3 or _is_negligible(epochs.validation, level.series(), settings.negligible_share):
        return None
    *earlier, gained = epochs.improvements()
    learnt = improvement(*epochs.train[-2:])
    fastest = max(earlier[-settings.epochs :])
    if not (gained < settings.improvement and learnt < settings.training_gain and fastest > settings.earlier_gain):
        return None
    rises = gained < -settings.improvement  # a rising loss is no stall
    if rises or has_decayed(lr, settings.decayed_share, info):
        return None
    return finding(
        Severity.WARNING, gained, settings.improvement, training_gain=learnt, earlier_gain=fastest,
        val_loss=epochs.validation[-1],
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationPlateau(Settings):
    """When `validation-plateau` fires."""

    change: float = between(0.01, 0.0, 1.0)
    """Change of the validation loss between epochs, as a fraction, below which it is flat."""
    window: int = between(3, 2, counts="epochs")
    """Number of epochs in a row that must be flat."""
    steps: int = between(10_000, 1, counts="steps")
    """Number of steps without a new best that make a plateau, whatever the epochs."""
    decayed_share: float = between(0.5, 0.0, 1.0)
    """Fraction of its peak below which the learning rate has decayed: a plateau is then information only."""
    negligible_share: float = between(0.05, 0.0, 1.0)
    """Fraction of the highest loss below which nothing is left to gain."""


@rule(
    "E103", "validation-plateau", reads=("eval/loss", "evaluation/epoch", _SCALE, "train/lr", _STEPS),
    when=("eval/loss",), per_scope=True, keep=1,
    settings=ValidationPlateau,
    message=(
        Message(
            "The validation loss has been flat for {epochs} epochs",
            "largest change {value:%} · expected at least {bound:%} · validation loss {val_loss}",
        ),
        Message(
            "The validation loss has not improved for {value} steps",
            "steps without a new best {value} · limit {bound} · validation loss {val_loss} · best {best}",
        ),
    ),
    remedies=(
        lower_lr(1 / 3, "a flat loss often falls again at a lower learning rate"), decay_lr(), reduce_on_plateau(),
        stop_early(),
    ),
)  # fmt: skip
def validation_plateau(
    validation: Panel, epoch: Panel, level: Panel, lr: Panel, loss: Panel, settings: ValidationPlateau, info: RunInfo
) -> Finding | None:
    """The validation loss has been flat for three epochs or 10,000 steps.

    ## Why is this bad?
    The run takes time and gains nothing. If the learning rate is still high, a lower one may help. Once it has decayed,
    the run is finished, and a plateau is information only. If epochs are shorter than 8 steps, as in training on the
    full batch, those of 100 steps count as one.

    ## Example
    fires: 3.0 2.0 2.0 2.01 | evaluation/epoch 1+1x4
    fires: 3.0 2.0 _x9999 2.1
    quiet: 3.0 2.0 1.9 1.85 | evaluation/epoch 1+1x4
    quiet: 3.0 2.0 2.0 2.01
    """
    losses = validation.series()
    readings = losses.finite()
    if len(readings) < 2 or not math.isfinite(losses.last):
        return None
    if _is_negligible(readings, level.series(), settings.negligible_share):
        return None
    severity = Severity.INFO if has_decayed(lr, settings.decayed_share, info) else Severity.WARNING
    ends, (at_ends, _) = aligned(losses, epoch.series())
    finite = np.isfinite(at_ends)
    (by_epoch,) = _joined(ends[finite], at_ends[finite][None], loss.series(), info).tolist()
    if len(ends) and ends[-1] == losses.at and is_plateau(by_epoch, settings.change, settings.window):
        largest = max(abs(improvement(*pair)) for pair in pairwise(by_epoch[-settings.window :]))
        return finding(severity, largest, settings.change, val_loss=losses.last, epochs=settings.window)
    best = int(losses.steps[np.nanargmin(np.where(np.isfinite(losses.values), losses.values, np.nan))])
    if losses.at - best >= settings.steps:
        return finding(severity, losses.at - best, settings.steps, val_loss=losses.last, best=readings.min())
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationRising(Settings):
    """When `validation-rising` fires."""

    rise: float = between(0.1, 0.0)
    """Fraction of its best by which the validation loss must exceed it."""
    lasting: int = between(2, 1, counts="readings")
    """Number of evaluations in a row that make a warning; fewer are information only."""
    negligible_share: float = between(0.05, 0.0, 1.0)
    """Fraction of the highest loss below which a validation loss is near zero: large rises are normal there."""


@rule(
    "E104", "validation-rising", reads=("eval/loss", _SCALE, _STEPS), when=("eval/loss",), keep=1,
    settings=ValidationRising,
    message=Message(
        "The validation loss is rising",
        "validation loss {value} · limit {bound} · best {best} · evaluations above the limit {evaluations}",
    ),
    remedies=(
        stop_early(), roll_back("the weights from before the rise do better on unseen samples"),
        lower_lr(1 / 3), raise_dropout(), raise_weight_decay(), smooth_labels(), shrink(),
    ),
)  # fmt: skip
def validation_rising(
    validation: Series, level: Series, loss: Series, settings: ValidationRising, info: RunInfo
) -> Finding | None:
    """The validation loss is more than 10% above its best.

    ## Why is this bad?
    What the run has learned since its best evaluation makes it worse on unseen samples. Either it overfits, or it
    diverges; the training loss tells which. One evaluation is information, two in a row are a warning. Evaluations that
    are fewer than 8 steps apart are joined to one for every 100 steps.

    ## Example
    fires: 3.0 2.0 2.5 2.6
    quiet: 3.0 2.0 2.1 2.1
    quiet: 3.0 0.01 0.02 0.03
    """
    finite = np.isfinite(validation.values)
    steps, losses = validation.steps[finite], validation.finite()
    (losses,) = _joined(steps, losses[None], loss, info)
    if len(losses) < 2 or not math.isfinite(validation.last):
        return None
    best = np.minimum.accumulate(losses)[:-1]
    above = losses[1:] > best + settings.rise * np.abs(best)
    if not above[-1] or _is_negligible(losses, level, settings.negligible_share):
        return None
    lasting = trailing(above)
    began = int(steps[-lasting])
    severity = Severity.WARNING if lasting >= settings.lasting else Severity.INFO
    return finding(
        severity, losses[-1], best[-1] + settings.rise * abs(best[-1]), best=best[-1], evaluations=lasting,
        lasting_steps=validation.at - began + 1,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Underfitting(Settings):
    """When `underfitting` fires."""

    gap: float = between(0.1, 0.0)
    """Fraction of the training loss by which the validation loss may exceed it."""
    training_gain: float = between(0.1, 0.0, 1.0)
    """Improvement of the training loss, as a fraction, that no epoch has reached so far."""
    epochs: int = between(3, 2, counts="epochs")
    """Number of epochs needed before anything is judged."""


@rule(
    "E105", "underfitting", reads=(*_LOSSES, _STEPS), when=_LOSSES[:1], keep=1,
    settings=Underfitting,
    message=Message(
        "Both losses fall slowly: the model may be too small",
        "best gain {value:%} · expected at least {bound:%} · loss {train_loss} · validation loss {val_loss}",
    ),
    remedies=(
        widen(), deepen(), add_parameters(), train_longer(),
        raise_lr(3.0, "if the model is large enough, the steps may be too small"),
    ),
)  # fmt: skip
def underfitting(
    train: Series, validation: Series, loss: Series, settings: Underfitting, info: RunInfo
) -> Finding | None:
    """Both losses fall slowly and stay close together.

    ## Why is this bad?
    This is information only. The model fits its training samples no better than unseen ones, and no epoch has gained
    10%. Either it is too small for the task, or it needs more time.

    ## Example
    fires: 4.5 4.2 4.0 3.9 | eval/loss 4.6 4.4 4.2 4.1
    quiet: 3.2 2.1 2.0 1.98 | eval/loss 3.5 2.8 2.7 2.68
    quiet: 4.5 4.2 4.0 3.9 | eval/loss 5.6 5.4 5.2 5.1
    """
    epochs = _Epochs.of(train, validation, loss, info)
    if len(epochs) < settings.epochs or not epochs.since_the_first:
        return None
    gains = [improvement(*pair) for pair in pairwise(epochs.train)]
    share = gap(epochs.train[-1], epochs.validation[-1])
    if not (share < settings.gap and all(0 < gain < settings.training_gain for gain in gains)):
        return None
    return finding(
        Severity.INFO, max(gains), settings.training_gain, gap=share, train_loss=epochs.train[-1],
        val_loss=epochs.validation[-1],
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneralizationGap(Settings):
    """When `generalization-gap` fires."""

    gap: float = between(0.3, 0.0)
    """Fraction of the training loss by which the validation loss must exceed it."""
    negligible_share: float = between(0.05, 0.0, 1.0)
    """Fraction of the highest loss below which a validation loss is near zero: a solved task has large gaps."""


@rule(
    "E109", "generalization-gap", reads=(*_LOSSES, _SCALE), keep=1,
    settings=GeneralizationGap,
    message=Message(
        "The validation loss is {value:%} above the training loss",
        "gap {value:%} · limit {bound:%} · training loss {train_loss} · validation loss {val_loss}",
    ),
    remedies=(
        raise_dropout(), raise_weight_decay(), smooth_labels(), shrink(), add_data(),
        advise("compare_the_data", "Check that both sets of samples come from the same source",
               "validation samples that are harder, or prepared differently, have a higher loss from the start"),
    ),
)  # fmt: skip
def generalization_gap(train: Series, validation: Series, level: Series, settings: GeneralizationGap) -> Finding | None:
    """The validation loss is far above the training loss.

    ## Why is this bad?
    This is information only. The model fits its training samples much better than unseen ones, which leaves room for
    regularization or more data. As long as the validation loss improves, training on still pays; `overfitting` says
    when it no longer does. A gap from the first epoch on often means that the two sets differ.

    ## Example
    fires: 3.5 2.1 1.2 0.8 | eval/loss 3.6 2.8 2.6 2.4
    quiet: 3.2 2.1 2.0 1.98 | eval/loss 3.5 2.5 2.4 2.3
    quiet: 3.5 0.1 0.02 0.01 | eval/loss 3.6 0.12 0.1 0.1
    """
    epochs = _Epochs.of(train, validation)
    if not len(epochs) or _is_negligible(epochs.validation, level, settings.negligible_share):
        return None
    share = gap(epochs.train[-1], epochs.validation[-1])
    if not share > settings.gap:
        return None
    return finding(Severity.INFO, share, settings.gap, train_loss=epochs.train[-1], val_loss=epochs.validation[-1])


@dataclass(frozen=True, slots=True)
class _Epochs:
    """Epochs with both losses known, oldest first."""

    train: list[float]
    validation: list[float]
    since_the_first: bool

    @classmethod
    def of(cls, train: Series, validation: Series, loss: Series | None = None, info: RunInfo | None = None) -> _Epochs:
        """Empty unless the newest epoch has both losses: old readings are not judged again.

        With the losses of all steps, short epochs are joined.
        """
        steps, pairs = aligned(train, validation)
        if not len(steps) or steps[-1] != train.at or train.at != validation.at:
            return cls([], [], False)
        if not np.isfinite(pairs[:, -1]).all():
            return cls([], [], False)
        finite = np.isfinite(pairs).all(axis=0)
        ours, theirs = (
            pairs[:, finite] if loss is None or info is None else _joined(steps[finite], pairs[:, finite], loss, info)
        )
        return cls(ours.tolist(), theirs.tolist(), bool(steps[0] == train.steps[0]))

    def __len__(self) -> int:
        return len(self.train)

    def improvements(self) -> list[float]:
        """Improvement of the validation loss from each epoch to the next."""
        return [improvement(*pair) for pair in pairwise(self.validation)]


def _joined(ends: Steps, rows: Floats, loss: Series, info: RunInfo) -> Floats:
    """The values of the epochs in each row; if epochs are short, the medians over the epochs of every 100 steps.

    Epochs of several steps are joined only once there are enough of them to compare.
    """
    if not len(loss) or len(ends) < 2 or info.step_is_epoch:
        return rows
    counts = ends if loss.cadence > 1 else np.searchsorted(loss.steps, ends, side="right")
    length, steps = counts[-1] - counts[-2], counts[-1] - counts[0] + 1
    if length >= _SHORT_EPOCH or (length > 1 and steps < _ENOUGH_JOINED * _JOINED_STEPS):
        return rows
    age = (counts[-1] - counts) // _JOINED_STEPS
    groups = range(steps // _JOINED_STEPS - 1, -1, -1)  # those that are complete, oldest first
    return np.array([np.median(rows[:, age == group], axis=1) for group in groups]).reshape(-1, len(rows)).T


def _is_negligible(losses: Sequence[float] | Floats, level: Series, share: float) -> bool:
    """Whether the newest loss is near zero, compared with the highest of these and of the training loss."""
    return bool(losses[-1] <= share * max([*losses, *level.finite()]))


@dataclass(frozen=True, kw_only=True)
class EvaluationThresholds(Settings):
    """The settings of the rules in this file, by the name of the rule."""

    overfitting: Overfitting = Overfitting()
    slow_improvement: SlowImprovement = SlowImprovement()
    validation_plateau: ValidationPlateau = ValidationPlateau()
    validation_rising: ValidationRising = ValidationRising()
    underfitting: Underfitting = Underfitting()
    generalization_gap: GeneralizationGap = GeneralizationGap()
