"""The course of the learning rate, which tells a planned change from a jump."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from forewarn.judge.series import Bools, Floats, Panel, Steps
from forewarn.types import RunInfo, Values, peak_lr


@dataclass(frozen=True, slots=True)
class Jump:
    """A sudden rise of the learning rate that no schedule makes."""

    step: int
    before: float
    after: float
    group: str
    """The group whose rate this is; empty if several groups jumped, of which this is the highest, or there is one."""
    peak: float
    """The highest rate of this group before, observed or declared."""


class JumpBounds(Protocol):
    """A rule's settings for when a learning rate has jumped."""

    @property
    def factor(self) -> float: ...

    @property
    def restart_tolerance(self) -> float: ...


def rates(lr: Panel, steps: Steps | None = None) -> Floats:
    """The largest learning rate among the groups at each of these steps, by default at every step in memory.

    NaN for a step before the first one in memory.
    """
    if steps is None:
        return _highest(lr.values)
    if not len(lr):
        return np.full(len(steps), np.nan)
    index = np.searchsorted(lr.steps, steps, side="right") - 1
    return np.where(index >= 0, _highest(lr.values[index]), np.nan)


def _highest(rows: Values) -> Floats:
    highest: Floats = np.fmax.reduce(rows.astype(np.float64), axis=1, initial=np.nan)
    return highest


def declared_peak(info: RunInfo) -> float:
    """The highest learning rate that an optimizer group or its scheduler declared; 0 if none did."""
    return max(_named_peaks(info), default=0.0)


def declared_peaks(lr: Panel, info: RunInfo) -> list[float]:
    """The highest declared learning rate of each group, in the order of scopes; 0 if the groups have changed."""
    named = _named_peaks(info)
    return named if len(named) == len(lr.scopes) else [0.0] * len(lr.scopes)


def _named_peaks(info: RunInfo) -> list[float]:
    return [max(group.get("lr", 0.0), peak_lr(group)) for group in info.groups]


def peak_rate(lr: Panel, info: RunInfo) -> float:
    """The highest learning rate observed or declared; 0 if there is none."""
    return max(declared_peak(info), float(np.fmax.reduce(lr.values, axis=None, initial=-np.inf)))


def peak_rates(lr: Panel, info: RunInfo) -> list[float]:
    """The highest learning rate of each group, observed or declared."""
    observed = np.fmax.reduce(lr.values, axis=0, initial=0.0).tolist()
    return [max(pair) for pair in zip(declared_peaks(lr, info), observed, strict=True)]


def is_above_declared(lr: Panel, plan: Panel, factor: float, info: RunInfo) -> bool:
    """Whether the learning rate is above this multiple of every rate that was declared; False if none was."""
    declared = max(declared_peak(info), float(np.fmax.reduce(plan.values, axis=None, initial=0.0)))
    return declared > 0 and bool(_highest(lr.last[None])[0] > factor * declared)


def has_decayed(lr: Panel, share: float, info: RunInfo) -> bool:
    """Whether the learning rate is below this share of its peak, observed or declared; False without a peak."""
    return bool(_highest(lr.last[None])[0] < share * peak_rate(lr, info))


def is_rising(lr: Panel, since: int) -> bool:
    """Whether the lr is higher now than at step `since`, or than at the oldest step in memory if that is later."""
    if not len(lr):
        return False
    then, now = rates(lr, np.array([max(since, int(lr.steps[0])), lr.at]))
    return bool(now > then)


def is_raised(before: Sequence[float], after: Sequence[float], factor: float) -> bool:
    """Whether a group's learning rate is at least this many times what it was at the reading before."""
    for old, new in zip(before, after, strict=False):  # noqa: SIM110 - on every step; a generator takes twice as long
        if new >= factor * old:
            return True
    return False


def newest_jump(lr: Panel, plan: Panel, settings: JumpBounds, info: RunInfo) -> Jump | None:
    """The jump at the newest step, if any. Usually this reads only two rows."""
    if len(lr) < 2 or not is_raised(lr.values[-2].tolist(), lr.values[-1].tolist(), settings.factor):
        return None
    return _last(lr, _jumps(lr, plan, settings, info)[-1:], info)


def last_jump(lr: Panel, plan: Panel, since: int, settings: JumpBounds, info: RunInfo) -> Jump | None:
    """The newest jump after step `since`, if any."""
    jumps = _jumps(lr, plan, settings, info)
    return _last(lr, jumps[np.searchsorted(lr.steps[1:], since, side="right") :], info)


def planned_growth(lr: Panel, plan: Panel, steps: Steps, settings: JumpBounds, info: RunInfo) -> Floats:
    """The planned growth of the lr since each of these steps, without jumps; 1 where it has fallen.

    NaN for a step before the first one in memory.
    """
    before, after = lr.values[:-1].astype(np.float64), lr.values[1:].astype(np.float64)
    usable = np.isfinite(lr.values) & (lr.values > 0)
    smooth = usable[:-1] & usable[1:] & ~_jumps(lr, plan, settings, info)
    growth = np.log(np.where(smooth, after, 1.0)) - np.log(np.where(smooth, before, 1.0))
    so_far = np.concatenate([np.zeros((1, growth.shape[1])), growth.cumsum(axis=0)])
    index = np.searchsorted(lr.steps, steps, side="right") - 1
    grown = np.exp((so_far[-1] - so_far[index]).max(axis=1, initial=0.0))
    return np.where(index >= 0, grown, np.nan)


def _jumps(lr: Panel, plan: Panel, settings: JumpBounds, info: RunInfo) -> Bools:
    """For each step in memory but the first, and each group: whether the lr jumped against all plans.

    A return to the peak is a restart. A return to an earlier rate is the next cycle, if the change is no larger than
    the gradual changes of the schedule. At the bottom of a cycle, such a change is many times the rate. Declared rates
    are planned too.
    """
    before, after = lr.values[:-1].astype(np.float64), lr.values[1:].astype(np.float64)
    rises: Bools = (before > 0) & (after >= settings.factor * before)
    if not rises.any():
        return rises
    highest, tolerance = np.fmax.accumulate(before, axis=0), settings.restart_tolerance
    peak = np.maximum(highest, declared_peaks(lr, info))
    restarts = (after >= (1 - tolerance) * peak) & (after <= (1 + tolerance) * peak)
    gradual = (after < settings.factor * before) & (before < settings.factor * after)
    with np.errstate(invalid="ignore"):
        change = after - before
    strides = np.fmax.accumulate(np.where(gradual, np.abs(change), 0.0), axis=0)
    cycles = (after <= highest) & (change <= (1 + tolerance) * strides)
    jumps: Bools = rises & ~restarts & ~cycles & ~_declared(lr, plan, tolerance)[1:]
    return jumps


def _declared(lr: Panel, plan: Panel, tolerance: float) -> Bools:
    """For each step in memory and group: whether the lr follows a plan, within this share of the highest rate."""
    if not len(plan) or plan.scopes != lr.scopes:
        return np.zeros(lr.values.shape, np.bool_)
    index = np.minimum(np.searchsorted(plan.steps, lr.steps), len(plan) - 1)
    highest = np.fmax.reduce(plan.values, axis=0)
    with np.errstate(invalid="ignore"):
        near: Bools = np.abs(lr.values - plan.values[index]) <= tolerance * highest
    near[plan.steps[index] != lr.steps] = False
    return near


def _last(lr: Panel, jumps: Bools, info: RunInfo) -> Jump | None:
    """The last True among the newest rows of `_jumps`."""
    rows = np.flatnonzero(jumps.any(axis=1))
    if not len(rows):
        return None
    row = len(lr) - len(jumps) + int(rows[-1])
    jumped = np.flatnonzero(jumps[rows[-1]])
    highest = jumped[np.argmax(lr.values[row, jumped])]
    group = lr.scopes[highest] if len(jumped) == 1 < len(lr.scopes) else ""
    peak = max(float(np.fmax.reduce(lr.values[:row, highest])), declared_peaks(lr, info)[highest])
    return Jump(int(lr.steps[row]), float(lr.values[row - 1, highest]), float(lr.values[row, highest]), group, peak)
