"""Rules that compare the training loss of the first epochs with the loss at the start of the run."""

from __future__ import annotations

from dataclasses import dataclass

from forewarn.judge.headlines import Message
from forewarn.judge.lr_course import is_rising
from forewarn.judge.registry import finding, rule
from forewarn.judge.remedies import (
    advise,
    clip_gradient,
    lower_lr,
    raise_lr,
    warm_up,
)
from forewarn.judge.series import Panel, Series
from forewarn.settings import Settings, between
from forewarn.types import Finding, Severity, improvement


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstEpochFlat(Settings):
    """When `first-epoch-flat` fires."""

    gain: float = between(0.02, 0.0, 1.0)
    """Fraction of its starting level by which the loss must have fallen by the end of an epoch."""
    rise: float = between(0.05, 0.0)
    """Fraction of that level by which it may have risen: a loss that rises further is not flat."""
    steps: int = between(200, 1, counts="steps")
    """Number of steps before anything is judged: some models take a hundred to start learning."""


@rule(
    "E106", "first-epoch-flat", reads=("evaluation/end_loss", "evaluation/start_loss", "train/lr"), per_scope=True,
    keep=1, explains=("E102", "E103", "E105"),
    settings=FirstEpochFlat,
    message=Message(
        "The first epoch barely changed the training loss",
        "training loss {start_loss} → {end_loss} · gain {value:%} · expected at least {bound:%}",
    ),
    remedies=(
        raise_lr(10.0, "after a whole epoch the loss is where it started: the steps are too small"),
        advise("inspect_labels", "Check that the labels match the inputs in the batch of step {step}",
               "nothing can be learned from labels that do not belong to their inputs"),
    ),
)  # fmt: skip
def first_epoch_flat(end: Panel, start: Panel, lr: Panel, settings: FirstEpochFlat) -> Finding | None:
    """The training loss has barely moved after an epoch.

    ## Why is this bad?
    The first epoch usually teaches the most. If it taught nothing, the learning rate is too low, or there is nothing to
    learn from. The rule waits while the learning rate is still rising.

    ## Example
    fires: _x299 4.60 | evaluation/start_loss _x299 4.61 | train/lr{0} 1e-7x300
    quiet: _x299 4.10 | evaluation/start_loss _x299 4.61 | train/lr{0} 1e-7x300
    quiet: _x299 4.60 | evaluation/start_loss _x299 4.61 | train/lr{0} 1e-7+1e-7x300
    """
    last, first = end.series(), start.series()
    if first.at != last.at or last.at < settings.steps or is_rising(lr, last.at // 2):
        return None
    moved = improvement(first.last, last.last)
    if not -settings.rise < moved < settings.gain:
        return None
    return finding(
        Severity.WARNING, moved, settings.gain, start_loss=first.last, end_loss=last.last, lasting_steps=last.at + 1
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstEpochSpike(Settings):
    """When `first-epoch-spike` fires."""

    factor: float = between(1.2, 1.0)
    """Multiple of the starting loss that the median of 16 losses in a row must not exceed."""
    recovery: float = between(0.05, 0.0, 1.0)
    """Fraction of the starting loss to gain by the end of the epoch for a spike to be information only."""
    critical_factor: float = between(3.0, 1.0)
    """Multiple of the starting loss above which the loss at the end of the epoch is critical."""


@rule(
    "E107", "first-epoch-spike", reads=("evaluation/peak_loss", "evaluation/start_loss", "evaluation/end_loss"),
    keep=1, explains=("L102", "L103", "L104", "L106", "G102", "G104", "E102", "E103", "E104"),
    settings=FirstEpochSpike,
    message=Message(
        "The training loss rose above where it started",
        "peak loss {value} · limit {bound} · starting loss {start_loss} · loss after the epoch {end_loss}",
    ),
    remedies=(
        lower_lr(0.1, "the first steps are far too large"), warm_up(), clip_gradient(),
    ),
)  # fmt: skip
def first_epoch_spike(peak: Series, start: Series, end: Series, settings: FirstEpochSpike) -> Finding | None:
    """The training loss rose above its value at the start of the run.

    ## Why is this bad?
    The model is now worse than its random initial weights: the learning rate is far too high for the start, or there is
    no warm-up. If the loss has come down again by the end of the epoch, this is information only.

    ## Example
    fires: _x99 6.5 | evaluation/start_loss _x99 4.61 | evaluation/end_loss _x99 4.7
    quiet: _x99 4.7 | evaluation/start_loss _x99 4.61 | evaluation/end_loss _x99 3.1
    """
    if not len(peak) or not start.at == end.at == peak.at or not start.last > 0:
        return None
    ratio = peak.last / start.last
    if not ratio > settings.factor:
        return None
    recovered = improvement(start.last, end.last) > settings.recovery
    lost = end.last > settings.critical_factor * start.last
    severity = Severity.INFO if recovered else Severity.CRITICAL if lost else Severity.WARNING
    return finding(
        severity, peak.last, settings.factor * start.last, start_loss=start.last, end_loss=end.last, ratio=ratio,
        lasting_steps=peak.at + 1,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class FirstEpochThresholds(Settings):
    """The settings of the rules in this file, by the name of the rule."""

    first_epoch_flat: FirstEpochFlat = FirstEpochFlat()
    first_epoch_spike: FirstEpochSpike = FirstEpochSpike()
