"""Can the model learn one batch by heart?"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from forewarn.preflight_checks.first_pass import FirstPass
from forewarn.preflight_checks.range_test import scale_rates
from forewarn.preflight_checks.result import PreflightCheck, State
from forewarn.preflight_checks.twin import LossFunction, Twin
from forewarn.types import figure

NAME = "one batch overfits"
LEARNED = 0.1
"""Fraction of the first loss below which the batch counts as learned, and the steps end; for a classifier also of the
entropy of its labels, since a first loss may be far too high."""
LEAST_FALL = 0.1
"""Minimum fall of the loss, as a fraction of the first: less is also what a changed bias achieves."""
BELOW_ENTROPY = 0.9
"""Fraction of the entropy of the batch's labels that a classifier must get below. The entropy itself is reached without
looking at the inputs."""
STILL_FALLING = 0.05
"""Fall over the last third of the steps, as a fraction, with which a loss is on its way."""


@dataclass(frozen=True, slots=True)
class OneBatch:
    """The losses of steps on one batch."""

    losses: tuple[float, ...]
    rate: float
    """The highest learning rate of the groups."""


def learn_one_batch(
    twin: Twin,
    function: LossFunction,
    batch: Any,
    num_steps: int,
    rate: float,
    seen: FirstPass,
    tell: Callable[[], None],
) -> OneBatch:
    """Train the copy on one batch until it is learned, at most for `num_steps` steps."""
    ignorant = seen.entropy if seen.is_cross_entropy and seen.entropy > 0 else math.inf
    scale_rates(twin, rate)
    losses: list[float] = []
    for _ in range(num_steps):
        losses.append(float(twin.step(function, batch)))
        tell()
        lately = losses[-3:]  # a loss that passes through 0 has no floor
        if not math.isfinite(losses[-1]) or all(0 <= loss < LEARNED * min(losses[0], ignorant) for loss in lately):
            break
    return OneBatch(tuple(losses), rate)


def check_one_batch(learned: OneBatch, seen: FirstPass, lowest: float = math.inf) -> PreflightCheck:
    """Whether the loss of one batch falls as far as it should; `lowest` is the lowest loss that was seen elsewhere."""
    losses = np.array(learned.losses)
    first, last = float(losses[0]), _level(losses)
    numbers = {"first": first, "last": last, "steps": float(len(losses)), "lr": learned.rate}
    course = f"{figure(first)} → {figure(last)} in {len(losses)} steps at a learning rate of {figure(learned.rate)}"
    if first <= 0 or lowest < 0 or (losses < 0).any():
        return PreflightCheck(NAME, State.UNKNOWN, f"{course}; a loss below 0 has no floor", "", numbers)
    if not np.isfinite(losses).all():
        return PreflightCheck(NAME, State.FAIL, f"{course}: the loss is not finite", "Lower the learning rate", numbers)
    floor, words = (1 - LEAST_FALL) * first, ""
    if seen.is_cross_entropy and 0 < BELOW_ENTROPY * seen.entropy < floor:
        floor = BELOW_ENTROPY * seen.entropy
        words = f"; without looking at the inputs it could reach {figure(seen.entropy)}"
    middle = _level(losses[: max(1, 2 * len(losses) // 3)])
    if last <= floor:
        return PreflightCheck(NAME, State.PASS, course, "", numbers)
    if last <= (1 - STILL_FALLING) * middle:
        return PreflightCheck(NAME, State.PASS, f"{course}, and still falling", "", numbers)
    is_lost = seen.is_cross_entropy and last >= (1 - LEAST_FALL / 2) * first  # other losses may not be made to fall
    state = State.FAIL if is_lost else State.LOOK
    return PreflightCheck(
        NAME, state, course + words,
        "Check that targets belong to their inputs, that the loss fits the output and that the model sees its input",
        numbers,
    )  # fmt: skip


def _level(losses: Any) -> float:
    """The median of the last losses; dropout makes single ones noisy."""
    return float(np.median(losses[-max(1, len(losses) // 10) :]))
