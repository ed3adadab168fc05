"""The planned learning rate at each step, declared by hand or read from a scheduler before the run."""

from __future__ import annotations

import copy
import functools
import math
import warnings
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
    """The planned learning rate, as a fraction of each parameter group's peak; 0 steps means no plan."""

    total: int = between(0, 0)
    """Optimizer steps in the whole run; 0 if there is no plan."""
    warmup: int = between(0, 0)
    """Steps of linear warm-up from 0 to the peak."""
    shape: Literal["cosine", "linear", "constant", "inverse_sqrt", "knots"] = "cosine"
    """Shape of the decay from the peak to the floor."""
    floor: float = between(0.0, 0.0, 1.0)
    """Fraction of the peak at the end of the run, for cosine and linear."""
    knots: str = ""
    """For the shape knots: `step:share` pairs such as "0:0 100:1 1000:0.1", joined by straight lines.

    If parameter groups follow different schedules, list the knots of each group, separated by `|`.
    """

    def __post_init__(self) -> None:
        super(Plan, self).__post_init__()
        if self.warmup and self.warmup >= self.total:
            raise ValueError(f"Plan.warmup ({self.warmup}) must be less than Plan.total ({self.total})")
        if (self.shape == "knots") != bool(self.knots):
            raise ValueError('Plan.knots and shape="knots" belong together: give both or neither')
        if not all(steps for steps, _ in _knots(self.knots)) and self.knots:
            raise ValueError("Plan.knots has a parameter group without a step:share pair")

    @property
    def num_groups(self) -> int | None:
        """The number of parameter groups with their own schedule; None if all share one."""
        return self.knots.count("|") + 1 if "|" in self.knots else None

    def share(self, step: int, group: int = 0) -> float:
        """The planned fraction of a group's peak at a step; NaN without a plan and after its end."""
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
        """The plan of a torch learning-rate scheduler that steps once per optimizer step, for a run of `total` steps.

        A copy of the scheduler runs ahead; the scheduler, the optimizer and the parameters stay unchanged. Groups with
        different schedules, relative to their peaks, each get their own plan. For several watched optimizers, pass a
        list of their schedulers in the same order.
        """
        if isinstance(total, bool) or not isinstance(total, int):
            raise TypeError(f"total must be an integer, the number of steps in the whole run, not {total!r}")
        if total < 1:
            raise ValueError(f"total must be at least 1, not {total}")
        schedulers = scheduler if isinstance(scheduler, list | tuple) else [scheduler]
        if not schedulers:
            raise TypeError("scheduler must be a torch learning-rate scheduler, or a list of them, not an empty list")
        courses = [course for item in schedulers for course in _courses(item, total)]
        num_left = min(map(len, courses))  # of the scheduler that is furthest ahead
        knots = [_text(course, total - num_left) for course in _distinct([course[-num_left:] for course in courses])]
        return cls(total=total, shape="knots", knots=" | ".join(knots))


def planned_peaks(scheduler: Any, total: int) -> list[float]:
    """The highest learning rate of each group of a scheduler until step `total`."""
    peaks = [peak_lr(group) or 1.0 for group in scheduler.optimizer.param_groups]
    return [peak * float(course.max()) for peak, course in zip(peaks, _courses(scheduler, total), strict=True)]


def _courses(scheduler: Any, total: int) -> list[NDArray[np.float64]]:
    """For each group of a scheduler: its fraction of the peak from the scheduler's current step to step `total`."""
    optimizer = getattr(scheduler, "optimizer", None)
    if optimizer is None or not hasattr(scheduler, "step"):
        raise TypeError(f"scheduler must be a torch learning-rate scheduler, not {type(scheduler).__name__}")
    if hasattr(scheduler, "num_bad_epochs"):
        raise ValueError(f"{type(scheduler).__name__} depends on the validation loss, so it has no plan")
    ahead = _Ahead(optimizer)
    twin = copy.deepcopy(scheduler, {id(optimizer): ahead})
    first = getattr(scheduler, "_schedulers", [scheduler])[0]  # a chain counts by its first link
    begun = int(getattr(scheduler, "last_epoch", first.last_epoch))
    if begun >= total:
        raise ValueError(f"the scheduler has already made {begun} of {total} steps; total must be larger")
    peaks = [peak_lr(group) or 1.0 for group in ahead.param_groups]  # 1 for a group that is off
    courses = np.empty((total - begun, len(peaks)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the user's own steps will give them
        for step in range(total - begun):
            courses[step] = [float(group["lr"]) / peak for group, peak in zip(ahead.param_groups, peaks, strict=True)]
            if step + 1 < total - begun:
                twin.step()
    unknown = np.flatnonzero(~np.isfinite(courses).all(axis=1))
    if len(unknown):
        raise ValueError(f"the scheduler's learning rate is not finite at step {begun + unknown[0]}")
    return list(courses.T)


def _distinct(courses: Sequence[NDArray[np.float64]]) -> Sequence[NDArray[np.float64]]:
    """The course of each group, or a single one if all active groups share it."""
    on = [course for course in courses if course.any()] or courses
    matches = (np.abs(course - on[0]).max() <= _TOLERANCE * np.abs(on[0]).max() for course in on)
    return on[:1] if all(matches) else courses


def _text(course: NDArray[np.float64], begun: int) -> str:
    return " ".join(f"{begun + index}:{course[index]:.6g}" for index in _kept(course))


class _Ahead:
    """Stands in for an optimizer while a copy of its scheduler runs ahead."""

    def __init__(self, optimizer: Any) -> None:
        self.param_groups = [
            {name: copy.copy(value) for name, value in group.items() if name != "params"}
            for group in optimizer.param_groups
        ]
        self.defaults = dict(optimizer.defaults)
        self.step = SimpleNamespace(_wrapped_by_lr_sched=True)
        self._opt_called = True


def _kept(shares: NDArray[np.float64]) -> list[int]:
    """Indices of the knots: the worst miss is added until straight lines fit all shares."""
    indices = [0, len(shares) - 1] if len(shares) > 1 else [0]
    steps = np.arange(len(shares))
    while len(indices) < _MOST_KNOTS:
        misses = np.abs(np.interp(steps, indices, shares[indices]) - shares)
        worst = int(misses.argmax())
        if misses[worst] <= _TOLERANCE * max(float(np.abs(shares).max()), 1e-12):
            break
        indices = sorted({*indices, worst})
    return indices


@functools.lru_cache(maxsize=8)  # called at every step
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
        raise ValueError("the steps of Plan.knots must increase")
    return [step for step, _ in pairs], [share for _, share in pairs]


def _is_finite(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False
