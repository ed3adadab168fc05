"""The rule that compares the learning-rate schedule with the declared epochs."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from forewarn.judge.headlines import Message
from forewarn.judge.lr_course import is_rising, peak_rate, rates
from forewarn.judge.registry import finding, rule
from forewarn.judge.remedies import (
    advise,
    declared,
    plan_steps,
)
from forewarn.judge.series import Panel
from forewarn.settings import Settings, between
from forewarn.types import Finding, RunInfo, Severity


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleMismatch(Settings):
    """When `schedule-mismatch` fires."""

    tolerance: float = between(0.2, 0.0)
    """Fraction by which the declared number of steps may differ from the number the epochs will take."""
    floor: float = between(0.01, 0.0, 1.0)
    """Fraction of its peak at or below which the learning rate has reached its end."""
    left: float = between(0.2, 0.0, 1.0)
    """Fraction of the run that must remain for that end to be too early."""
    open_end: float = between(0.5, 0.0, 1.0)
    """Fraction of its peak above which a decaying learning rate is too high at the end of the run."""


@rule(
    "E108", "schedule-mismatch", reads=("evaluation/epoch", "train/lr"), per_scope=True, keep=1,
    settings=ScheduleMismatch,
    message=(
        Message(
            "The schedule does not match the number of epochs",
            "planned steps {value} · needed steps {bound} · epochs {epochs}",
        ),
        Message(
            "The schedule ended with {left:%} of the run to go",
            "learning rate {value} · expected at least {bound} · ended at step {ended}",
        ),
        Message(
            "The run ended before its schedule did",
            "learning rate {value} · expected at most {bound} · peak {peak}",
        ),
        Message("The run is longer than its schedule", "steps {value} · planned steps {bound}"),
    ),
    remedies=(
        plan_steps(),
        advise("check_stepping", "Step a scheduler made for epochs once per epoch, not per batch",
               "stepping it with every batch uses up the schedule far too early"),
    ),
)  # fmt: skip
def schedule_mismatch(epoch: Panel, lr: Panel, settings: ScheduleMismatch, info: RunInfo) -> Finding | None:
    """The learning-rate schedule does not end with the run.

    ## Why is this bad?
    A schedule that ends early leaves epochs in which nothing is learned. A schedule made for a longer run never reaches
    the small steps at its end, where much of the loss is won.

    The rule compares the run with the declared `total_steps` and `epochs`. It fires if the epochs take a different
    number of steps than planned, or if the run continues past the plan. It also fires if the learning rate reaches its
    end long before the run does. A learning rate that is still high when the run ends is information only.

    ## Example
    fires: _x49 5 | train/lr{0} 1e-3x20 1e-6x30 | facts/epochs 10
    fires: _x49 5 | train/lr{0} 1e-3x50 | facts/epochs 10 | facts/total_steps 1000
    fires: _x49 5 | train/lr{0} 1e-3x50 | facts/total_steps 30
    fires: _x49 5 | train/lr{0} 1e-3x25 6e-4x25 | facts/epochs 5
    quiet: _x49 5 | train/lr{0} 1e-3x50 | facts/epochs 10 | facts/total_steps 100
    quiet: _x49 5 | train/lr{0} 1e-3x20 1e-6x30
    """
    count = epoch.series().last
    if not count > 0:
        return None
    done = epoch.at + 1
    planned, epochs = declared(info, "total_steps"), declared(info, "epochs")
    needed = done / count * epochs
    expected = needed if math.isnan(planned) or abs(planned - needed) > settings.tolerance * needed else planned
    steps_needed = round(done if math.isnan(expected) else max(done, expected))
    if not math.isnan(planned) and expected != planned:
        return finding(Severity.WARNING, planned, expected, epochs=epochs, epochs_done=count, steps_needed=steps_needed)
    if done > (1 + settings.tolerance) * planned:
        return finding(Severity.WARNING, done, planned, epochs_done=count, steps_needed=steps_needed)
    if not len(lr) or is_rising(lr, 0):
        return None
    used = rates(lr)
    rate, peak = float(used[-1]), peak_rate(lr, info)
    above = np.flatnonzero(used > settings.floor * peak)
    ended = int(lr.steps[above[-1]]) + 1 if len(above) else int(lr.steps[0])
    left = 1 - ended / expected
    if rate <= settings.floor * peak and ended < done and left > settings.left:
        return finding(Severity.WARNING, rate, settings.floor * peak, ended=ended, left=left, steps_needed=steps_needed)
    if done >= expected and settings.open_end * peak < rate < (1 - settings.floor) * peak:
        return finding(Severity.INFO, rate, settings.open_end * peak, peak=peak, steps_needed=steps_needed)
    return None


@dataclass(frozen=True, kw_only=True)
class EpochScheduleThresholds(Settings):
    """The settings of the rules in this file, by the name of the rule."""

    schedule_mismatch: ScheduleMismatch = ScheduleMismatch()
