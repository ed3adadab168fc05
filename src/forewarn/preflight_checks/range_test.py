"""Which learning rate? An exponential sweep on the copy (Smith 2017, arXiv 1506.01186)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forewarn.preflight_checks.result import PreflightCheck, RateCurve, State
from forewarn.preflight_checks.twin import LossFunction, Twin, set_rate
from forewarn.types import figure, peak_lr

Floats = NDArray[np.float64]

NAME = "learning rate"
LOWEST, HIGHEST = 1e-7, 10.0
"""The rates swept; further if the optimizer's own is near an end."""
MARGIN = 30.0
"""Minimum factor between the optimizer's own rate and the ends of the sweep."""
SMOOTHING = 3
"""Half the width of the triangular window over the losses, in steps."""
RISEN = 1.0
"""Rise above the first loss, as a fraction of it, at which the sweep ends."""
LEAST_FALL = 0.02
"""Minimum fall of the smoothed loss, as a fraction of the first, for a rate to be suggested."""
LARGEST_FALL = 3.0
"""Largest fall, as a multiple of the first loss: a loss that falls further has no floor, and no best rate either."""
NOISES = 3.0
"""Minimum fall or rise of the loss as a multiple of the noise between steps."""
BELOW_BEST = 10.0
"""The suggestion is at most the rate of the lowest loss over this: the rule of thumb of fastai's `lr_find`."""
FAR_TOO_HIGH = 3.0
"""Factor above the limit from which a rate is far too high if its loss has not fallen after a few steps. Networks with
batch norm survive rates at which the sweep, which never rests, has lost what it gained."""
FAR_TOO_LOW = 1000.0
"""Factor below the suggestion from which a rate is far too low. A fine-tuned network at 2e-5 was
350 times below it."""


def scale_rates(twin: Twin, top: float) -> None:
    """Set the learning rates of all groups so that the highest is `top`; they keep their ratios."""
    peaks = [peak_lr(group) for group in twin.groups]
    highest = max((peak for peak in peaks if peak > 0), default=0.0)
    for group, peak in zip(twin.groups, peaks, strict=True):
        if "lr" in group:
            set_rate(group, top * peak / highest if highest else top)


def present_rate(twin: Twin) -> float:
    """The highest learning rate of all groups, at its peak if a scheduler has noted one; NaN without one."""
    rates = [rate for rate in map(peak_lr, twin.groups) if math.isfinite(rate)]
    return max(rates, default=math.nan)


def range_test(
    twin: Twin,
    function: LossFunction,
    batches: Sequence[Any],
    num_steps: int,
    tell: Callable[[], None],
    accumulate: int = 1,
) -> RateCurve:
    """Raise the learning rate exponentially from step to step, each on some batches, and follow the loss."""
    present = present_rate(twin)
    around = present if present > 0 else 1e-3
    rates = np.geomspace(min(LOWEST, around / MARGIN), max(HIGHEST, around * MARGIN), num_steps)
    apart = _apart(twin, function, batches)
    losses: list[float] = []
    lowest = math.inf
    for number, rate in enumerate(rates):
        scale_rates(twin, float(rate))
        places = [place % len(batches) for place in range(number * accumulate, (number + 1) * accumulate)]
        loss = float(twin.step(function, *(batches[place] for place in places)))
        lowest = min(lowest, loss)
        losses.append(loss - sum(apart[place] for place in places) / accumulate)
        tell()
        if not math.isfinite(losses[-1]) or _has_risen(losses):
            break
    swept = np.array(losses)
    return replace(_judged(rates[: len(swept)], swept, present), lowest=lowest)


def _apart(twin: Twin, function: LossFunction, batches: Sequence[Any]) -> list[float]:
    """How far the loss of each batch lies from the mean at the start, so that the curve does not show it."""
    first = [float(twin.loss(function, batch).detach()) for batch in batches]
    mean = sum(first) / len(first)
    return [loss - mean if math.isfinite(loss - mean) else 0.0 for loss in first]


def _has_risen(losses: Sequence[float]) -> bool:
    first, lowest = losses[0], min(losses)
    return min(losses[-2:]) > first + max(RISEN * abs(first), 2 * (first - lowest))


def _judged(rates: Floats, losses: Floats, present: float) -> RateCurve:
    """The smoothed curve with the suggested rate and the limit."""
    finite = np.isfinite(losses)
    count = int(np.argmin(finite)) if not finite.all() else len(losses)
    smooth = _smoothed(losses[:count])
    curve = (tuple(map(float, rates[:count])), tuple(map(float, smooth)))
    if count < 2 * SMOOTHING + 1:
        return RateCurve(*curve, present)
    start, lowest = float(np.median(losses[: SMOOTHING + 1])), int(np.argmin(smooth))
    fall = start - float(smooth[lowest])
    lowest_rates = losses[: max(count // 3, 4)]
    noise = float(np.median(np.abs(np.diff(lowest_rates))))
    risen = max(start, float(np.median(lowest_rates))) + NOISES * noise
    limit = _limit(rates, smooth, lowest, risen, ended=count < len(losses) or _has_risen(list(losses[:count])))
    if not max(LEAST_FALL * abs(start), NOISES * noise) <= fall <= LARGEST_FALL * abs(start):
        return RateCurve(*curve, present, limit=limit)
    steepest = _steepest(smooth[: lowest + 1])
    suggested = min(float(rates[lowest]) / BELOW_BEST, max(float(rates[steepest]), float(rates[lowest]) / 100))
    return RateCurve(*curve, present, float(f"{suggested:.1g}"), limit)


def _limit(rates: Floats, smooth: Floats, lowest: int, risen: float, ended: bool) -> float:
    """The rate at which the loss, after its lowest, is back above its start; the last if the sweep broke off."""
    above = np.flatnonzero(smooth[lowest:] > risen)
    if len(above):
        return float(rates[lowest + above[0]])
    return float(rates[len(smooth) - 1]) if ended else math.nan


def _steepest(smooth: Floats) -> int:
    return int(np.argmin(np.gradient(smooth))) if len(smooth) > 1 else 0


def _smoothed(losses: Floats) -> Floats:
    """Centred, so that the curve is not shifted towards higher rates."""
    if not len(losses):
        return losses
    window = np.concatenate([np.arange(1, SMOOTHING + 2), np.arange(SMOOTHING, 0, -1)]).astype(np.float64)
    padded = np.pad(losses, SMOOTHING, mode="edge")
    smooth: Floats = np.convolve(padded, window / window.sum(), mode="valid")
    return smooth


def check_rate(curve: RateCurve, losses: Sequence[float]) -> PreflightCheck:
    """Whether the optimizer's own learning rate lies in the range where the loss falls.

    `losses` are those of a few steps at that rate.
    """
    numbers = {"present": curve.present, "suggested": curve.suggested, "limit": curve.limit}
    yours = f"yours is {figure(curve.present)}"
    if not curve.present > 0:
        return PreflightCheck(NAME, State.FAIL, f"{yours}: nothing moves", "Set a learning rate above 0", numbers)
    better = (
        f"Try a learning rate of {figure(curve.suggested)}"
        if math.isfinite(curve.suggested)
        else "Lower the learning rate"
    )
    first, last = losses[0], float(np.median(losses[-len(losses) // 3 :]))
    if curve.present >= curve.limit and not last < first:
        course = f"the loss goes from {figure(first)} to {figure(last)} in {len(losses)} steps"
        is_far = curve.present >= FAR_TOO_HIGH * curve.limit or not math.isfinite(last)
        state = State.FAIL if is_far else State.LOOK
        return PreflightCheck(NAME, state, f"{yours}: {course}", better, numbers)
    if not math.isfinite(curve.suggested):
        return PreflightCheck(NAME, State.INFO, f"no clear rate; {yours}", "", numbers)
    limit = f"; from {figure(curve.limit)} on the loss rises" if math.isfinite(curve.limit) else ""
    words = f"suggested {figure(curve.suggested)}; {yours}{limit}"
    if curve.present < curve.suggested / FAR_TOO_LOW:
        return PreflightCheck(NAME, State.LOOK, words, better, numbers)
    return PreflightCheck(NAME, State.PASS, words, "", numbers)
