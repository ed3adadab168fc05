"""The planned learning rate at each step, declared or read from a scheduler before the run."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from forewarn.settings import Settings, between
from forewarn.types import peak_lr

_TOLERANCE = 2e-3
"""Maximum error of the straight lines between knots, as a fraction of the peak."""
_MOST_KNOTS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(Settings):
    """What the learning rate should be, as a share of the peak of each parameter group; 0 steps are no plan."""

    total: int = between(0, 0)
    """Optimizer steps of the whole run; 0 if there is no plan."""
    warmup: int = between(0, 0)
    """Steps of the linear rise from 0 to the peak at the start."""
    shape: Literal["cosine", "linear", "constant", "inverse_sqrt", "knots"] = "cosine"
    """The way from the peak to the floor."""
    floor: float = between(0.0, 0.0, 1.0)
    """Share of the peak at the end of the run, for cosine and linear."""
    knots: str = ""
    """For the shape knots: `step:share` pairs such as "0:0 100:1 1000:0.1", straight lines between them.

    Where parameter groups follow different schedules, the knots of each in turn, with `|` between them.
    """

    def __post_init__(self) -> None:
        super(Plan, self).__post_init__()
        if self.warmup and self.warmup >= self.total:
            raise ValueError(f"Plan.warmup ({self.warmup}) must be less than Plan.total ({self.total})")
        if (self.shape == "knots") != bool(self.knots):
            raise ValueError('Plan.knots and shape="knots" go together: give both or neither')
        if not all(steps for steps, _ in _knots(self.knots)) and self.knots:
            raise ValueError("Plan.knots has a parameter group without a step:share pair")

    @property
    def num_groups(self) -> int | None:
        """For how many parameter groups it has a schedule each; None if one is for all of them."""
        return self.knots.count("|") + 1 if "|" in self.knots else None

    def share(self, step: int, group: int = 0) -> float:
        """The share of its peak that is planned for a group at a step; NaN without a plan and after its end."""
        if step >= self.total:
            return math.nan
        if self.shape == "knots":
            steps, shares = _knots(self.knots)[group if self.num_groups else 0]
            return float(np.interp(step, steps, shares)) if step >= steps[0] else math.nan
        if step < self.warmup:
            return (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.total - self.warmup)
        if self.shape == "constant":
            return 1.0
        if self.shape == "inverse_sqrt":
            return math.sqrt(max(1, self.warmup) / max(1, step + 1))
        decay = (1 + math.cos(math.pi * done)) / 2 if self.shape == "cosine" else 1 - done
        return self.floor + (1 - self.floor) * decay

    @classmethod
    def from_scheduler(cls, scheduler: Any, total: int) -> Self:
        """The plan of a torch learning-rate scheduler for a run of `total` steps, stepping once per optimizer step.

        A copy of the scheduler is run ahead; the scheduler, the optimizer and the parameters are left alone. Groups
        that follow different schedules, as shares of their peaks, have a plan each. For several watched optimizers,
        pass a list of their schedulers in the same order.
        """
        if isinstance(total, bool) or not isinstance(total, int):
            raise TypeError(f"total must be the number of steps of the whole run, a whole number, not {total!r}")
        if total < 1:
            raise ValueError(f"total must be at least 1, not {total}")
        schedulers = scheduler if isinstance(scheduler, list | tuple) else [scheduler]
        if not schedulers:
            raise TypeError("scheduler must be a torch learning-rate scheduler, or a list of them, not an empty list")
        courses = [course for item in schedulers for course in _courses(item, total)]
        num_left = min(map(len, courses))  # by the scheduler that is furthest ahead
        knots = [_text(course, total - num_left) for course in _distinct([course[-num_left:] for course in courses])]
        return cls(total=total, shape="knots", knots=" | ".join(knots))


def _courses(scheduler: Any, total: int) -> list[NDArray[np.float64]]:
    """For each group of a scheduler: its share of the peak from the scheduler's current step to step `total`."""
    optimizer = getattr(scheduler, "optimizer", None)
    if optimizer is None or not hasattr(scheduler, "step"):
        raise TypeError(f"scheduler must be a torch learning-rate scheduler, not {type(scheduler).__name__}")
    if hasattr(scheduler, "num_bad_epochs"):
        raise ValueError(f"{type(scheduler).__name__} follows the validation loss: it has no plan")
    ahead = _Ahead(optimizer)
    twin = copy.deepcopy(scheduler, {id(optimizer): ahead})
    first = getattr(scheduler, "_schedulers", [scheduler])[0]  # a chain counts by its first link
    begun = int(getattr(scheduler, "last_epoch", first.last_epoch))
    if begun >= total:
        raise ValueError(f"the scheduler has made {begun} steps already, which leaves nothing of {total}")
    peaks = [peak_lr(group) or 1.0 for group in ahead.param_groups]  # 1 for a group that is off
    courses = np.empty((total - begun, len(peaks)))
    for step in range(total - begun):
        courses[step] = [float(group["lr"]) / peak for group, peak in zip(ahead.param_groups, peaks, strict=True)]
        if step + 1 < total - begun:
            twin.step()
    unknown = np.flatnonzero(~np.isfinite(courses).all(axis=1))
    if len(unknown):
        raise ValueError(f"the scheduler gives a learning rate that is not finite at step {begun + unknown[0]}")
    return list(courses.T)


def _distinct(courses: Sequence[NDArray[np.float64]]) -> Sequence[NDArray[np.float64]]:
    """The course of each group, or a single one if all groups that are on follow it."""
    on = [course for course in courses if course.any()] or courses
    matches = (np.abs(course - on[0]).max() <= _TOLERANCE * np.abs(on[0]).max() for course in on)
    return on[:1] if all(matches) else courses


def _text(course: NDArray[np.float64], begun: int) -> str:
    return " ".join(f"{begun + index}:{course[index]:.6g}" for index in _kept(course))


class _Ahead:
    """Stands in for an optimizer while a copy of its scheduler runs ahead of it."""

    def __init__(self, optimizer: Any) -> None:
        self.param_groups = [
            {name: copy.copy(value) for name, value in group.items() if name != "params"}
            for group in optimizer.param_groups
        ]
        self.defaults = dict(optimizer.defaults)
        self.step = SimpleNamespace(_wrapped_by_lr_sched=True)
        self._opt_called = True


def _kept(shares: NDArray[np.float64]) -> list[int]:
    """Indices of the knots: the worst miss is added until straight lines come near all shares."""
    indices = [0, len(shares) - 1] if len(shares) > 1 else [0]
    steps = np.arange(len(shares))
    while len(indices) < _MOST_KNOTS:
        misses = np.abs(np.interp(steps, indices, shares[indices]) - shares)
        worst = int(misses.argmax())
        if misses[worst] <= _TOLERANCE * max(float(np.abs(shares).max()), 1e-12):
            break
        indices = sorted({*indices, worst})
    return indices


@functools.lru_cache(maxsize=8)  # asked for at every step
def _knots(text: str) -> tuple[tuple[list[int], list[float]], ...]:
    """The steps and the shares of each group."""
    return tuple(map(_knots_of_one, text.split("|")))


def _knots_of_one(text: str) -> tuple[list[int], list[float]]:
    pairs = []
    for pair in text.split():
        step, _, share = pair.partition(":")
        if not step.isdigit() or not _is_finite(share):
            raise ValueError(f"Plan.knots must be step:share pairs such as '0:0 100:1', not {pair!r}")
        pairs.append((int(step), float(share)))
    if [step for step, _ in pairs] != sorted({step for step, _ in pairs}):
        raise ValueError("the steps of Plan.knots must rise")
    return [step for step, _ in pairs], [share for _, share in pairs]


def _is_finite(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False
