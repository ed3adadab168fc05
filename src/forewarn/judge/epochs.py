"""The result of an epoch: how much the validation loss improved, and how far it is above the training loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from forewarn.types import improvement, in_words

GOOD_IMPROVEMENT = 0.05
"""Improvement rate of the validation loss above which an epoch was good."""
MILD_GAP = 0.1
"""Largest healthy gap between validation and training loss, as a fraction of the training loss."""


def is_plateau(losses: Sequence[float], change: float, window: int) -> bool:
    """Whether the loss changed by less than `change` from each of the last `window` epochs to the next."""
    recent = losses[-window:]
    return len(recent) == window and all(abs(improvement(*pair)) < change for pair in pairwise(recent))


class Patience:
    """Counts how long a loss has not improved by `min_delta`; a patience of 0 never ends."""

    def __init__(self, patience: int, min_delta: float) -> None:
        self._patience = patience
        self._min_delta = min_delta
        self.best = math.inf
        self.waited = 0
        """Number of losses in a row without an improvement."""

    def is_over(self, loss: float) -> bool:
        """Whether patience ends with this loss."""
        if loss < self.best - self._min_delta:
            self.best, self.waited = loss, 0
        else:
            self.waited += 1
        return 0 < self._patience <= self.waited

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "waited": self.waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best, self.waited = float(state.get("best", math.inf)), int(state.get("waited", 0))


@dataclass(frozen=True, slots=True)
class Epoch:
    """One evaluation, as recorded. Unknown numbers are NaN, and their grades empty."""

    number: int
    step: int
    train_loss: float
    validation_loss: float
    improvement_rate: float
    improvement_grade: str
    """`poor`, `acceptable` or `good`."""
    train_val_gap: float
    gap_grade: str
    """`healthy`, `mild` or `severe`."""
    plateau_detected: bool

    def words(self) -> str:
        """`epoch 2: train 2.1, validation 2.8, improvement 20% (good), gap 33% (severe)`."""
        figures = [
            ("train", self.train_loss, in_words(self.train_loss)),
            ("validation", self.validation_loss, in_words(self.validation_loss)),
            ("improvement", self.improvement_rate, f"{_percent(self.improvement_rate)} ({self.improvement_grade})"),
            ("gap", self.train_val_gap, f"{_percent(self.train_val_gap)} ({self.gap_grade})"),
        ]
        parts = [f"{name} {words}" for name, value, words in figures if not math.isnan(value)]
        return f"epoch {self.number}: {', '.join(parts + ['plateau'] * self.plateau_detected)}"


def improvement_grade(rate: float, poor: float) -> str:
    """An improvement rate in a word: poor below 1% (or the run's own limit), good above 5%."""
    if math.isnan(rate):
        return ""
    return "poor" if rate < poor else "acceptable" if rate <= GOOD_IMPROVEMENT else "good"


def gap_grade(share: float, severe: float) -> str:
    """A gap between training and validation loss in a word: severe above 30% (or the run's own limit)."""
    if math.isnan(share):
        return ""
    return "severe" if share > severe else "healthy" if share < MILD_GAP else "mild"


NO_VALIDATION_LOSS = (
    "no validation loss was given, so overfitting cannot be seen: pass val_loss to monitor.end_epoch, or validation "
    "data to the trainer"
)


def epochs(
    series: Callable[[str], Any], *, poor: float, severe: float, change: float, window: int
) -> tuple[Epoch, ...]:
    """Every evaluation of a run; `series` gives the readings of a metric by name, as steps and values.

    An improvement below `poor` is poor, and a gap above `severe` is severe. A plateau is a change of less than `change`
    in each of `window` epochs.
    """

    def readings(name: str) -> dict[int, float]:
        recorded = series(name)
        return dict(zip(recorded.steps.tolist(), recorded.values.tolist(), strict=True))

    train, validation = readings("evaluation/train_loss"), readings("eval/loss")
    rates, gaps = readings("evaluation/improvement_rate"), readings("evaluation/train_val_gap")
    numbers = readings("evaluation/epoch")
    judged = [step for step in numbers if math.isfinite(validation.get(step, math.nan))]
    losses = [validation[step] for step in judged]
    plateaus = {step for end, step in enumerate(judged, 1) if is_plateau(losses[:end], change, window)}
    return tuple(
        Epoch(
            number=int(number),
            step=step,
            train_loss=train.get(step, math.nan),
            validation_loss=validation.get(step, math.nan),
            improvement_rate=(rate := rates.get(step, math.nan)),
            improvement_grade=improvement_grade(rate, poor),
            train_val_gap=(share := gaps.get(step, math.nan)),
            gap_grade=gap_grade(share, severe),
            plateau_detected=step in plateaus,
        )
        for step, number in numbers.items()
    )


def _percent(share: float) -> str:
    if abs(share) >= 10:  # digits mean nothing beyond that
        return ">1000%" if share > 0 else "<-1000%"
    return f"{100 * share:.{2 if abs(share) < 1 else 4}g}%"
