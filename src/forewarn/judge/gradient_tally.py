"""Summaries of gradient norms: vanishing and exploding layers, task collapse, totals over a run.

Plain arithmetic on norms that were measured elsewhere; neither torch nor a model is needed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from forewarn.standing import TOO_EARLY
from forewarn.types import in_words

VANISHING = 1e-7
EXPLODING = 10.0
WINDOW = 10
COLLAPSE = 5.0
MINOR, SIGNIFICANT = 2.0, 3.0
"""Ratio of two tasks' gradients up to which they are balanced, and ratio from which the difference matters."""

MOST_NAMES = 4
"""Number of layers that a summary names; the others are only counted."""


def detect_vanishing_gradients(norms: Mapping[str, float], threshold: float = VANISHING) -> list[str]:
    """The layers whose gradient norm is below `threshold`."""
    return [name for name, norm in norms.items() if norm < threshold]


def detect_exploding_gradients(norms: Mapping[str, float], threshold: float = EXPLODING) -> list[str]:
    """The layers whose gradient norm is above `threshold`, or is not a finite number."""
    return [name for name, norm in norms.items() if not norm <= threshold]


def detect_task_collapse(
    ratios: Sequence[float], window_size: int = WINDOW, collapse_threshold: float = COLLAPSE
) -> tuple[bool, str]:
    """Whether one of two tasks has taken over, and a sentence about it.

    `ratios` are gradient norms of the first task divided by those of the second. The mean of the last `window_size` is
    compared with the threshold and its inverse. The rule T102 does the same on a log scale, and names the tasks.
    """
    if window_size < 1 or not collapse_threshold > 1:
        raise ValueError("window_size must be 1 or more and collapse_threshold more than 1")
    recent = [float(ratio) for ratio in ratios][-window_size:]
    if len(recent) < window_size:
        return False, f"not enough data: {len(recent)} of {window_size} ratios"
    mean = sum(recent) / len(recent)
    if math.isnan(mean):
        return False, "not enough data: a ratio is not a number"
    words = f"mean gradient ratio {in_words(mean)} over the last {window_size}"
    if mean > collapse_threshold:
        return (
            True,
            f"the first task dominates and the second is starved: {words}, bound {in_words(collapse_threshold)}",
        )
    if mean < 1 / collapse_threshold:
        bound = in_words(1 / collapse_threshold)
        return True, f"the second task dominates and the first is starved: {words}, bound {bound}"
    return False, f"no collapse: {words}"


def balance_in_words(ratio: float) -> str:
    """The balance of two tasks with this ratio of gradient norms."""
    apart = max(ratio, 1 / ratio) if ratio > 0 else math.inf
    if apart <= MINOR:
        return "balanced"
    return "slightly uneven" if apart <= SIGNIFICANT else "uneven" if apart <= COLLAPSE else "very uneven"


@dataclass(frozen=True, slots=True)
class GradientSummary:
    """The gradients over a run; `str()` gives a few readable lines."""

    count: int
    """Number of norms."""
    mean: float
    std: float
    peak: float
    peak_at: int
    """The epoch or step of the peak."""
    vanishing: tuple[str, ...]
    """Layers that vanished at any time."""
    exploding: tuple[str, ...]
    task_balance: str
    """The mean ratio of the last checks in words, or why there is none."""
    unit: str = "epoch"
    """Of `peak_at`."""

    def rows(self) -> list[tuple[str, str]]:
        """Labels and values."""
        norm = "not enough data"
        if self.count:
            norm = f"mean {in_words(self.mean)} ± {in_words(self.std)}, "
            norm += f"highest {in_words(self.peak)} in {self.unit} {self.peak_at}"
        return [
            ("gradient norm", norm),
            ("vanishing layers", _listed(self.vanishing)),
            ("exploding layers", _listed(self.exploding)),
            ("task balance", self.task_balance),
        ]

    def __str__(self) -> str:
        return "\n".join(f"{label + ':':18} {value}" for label, value in self.rows())


@dataclass(slots=True)
class GradientTally:
    """Adds up gradient norms in bounded memory."""

    vanishing_threshold: float = VANISHING
    exploding_threshold: float = EXPLODING
    unit: str = "epoch"
    """The unit of the positions of norms."""
    _count: int = 0
    _mean: float = 0.0
    _squares: float = 0.0
    """Sum of squared distances from the mean (Welford)."""
    _peak: tuple[float, int] = (-math.inf, -1)
    _vanishing: dict[str, None] = field(default_factory=dict)
    _exploding: dict[str, None] = field(default_factory=dict)
    _ratios: list[float] = field(default_factory=list)

    def add_norm(self, position: int, norm: float) -> None:
        """Add the global norm at an epoch or step; a non-finite one shows up in the list of layers instead."""
        if not math.isfinite(norm):
            return
        self._count += 1
        before = norm - self._mean
        self._mean += before / self._count
        self._squares += before * (norm - self._mean)
        self._peak = max(self._peak, (norm, position), key=lambda peak: peak[0])

    def add_layers(self, norms: Mapping[str, float]) -> None:
        self._vanishing |= dict.fromkeys(detect_vanishing_gradients(norms, self.vanishing_threshold))
        self._exploding |= dict.fromkeys(detect_exploding_gradients(norms, self.exploding_threshold))

    def add_ratio(self, ratio: float) -> None:
        """Add the gradient norm of the first task divided by that of the second."""
        if ratio > 0 and math.isfinite(ratio):
            self._ratios = [*self._ratios, ratio][-WINDOW:]

    @property
    def mean_ratio(self) -> float:
        """The mean of the last ratios on a log scale, where a/b and b/a are symmetric; NaN if there are none."""
        return math.exp(sum(map(math.log, self._ratios)) / len(self._ratios)) if self._ratios else math.nan

    def summary(self, pair: str = "the tasks") -> GradientSummary:
        balance, ratio, words = "not enough data", in_words(self.mean_ratio), balance_in_words(self.mean_ratio)
        if len(self._ratios) == WINDOW:
            balance = f"{words}: {pair} {ratio} over the last {WINDOW} checks"
        elif self._ratios:
            balance = f"{TOO_EARLY} ({len(self._ratios)} of {WINDOW} checks): {pair} {ratio} so far, {words}"
        std = math.sqrt(self._squares / (self._count - 1)) if self._count > 1 else 0.0
        return GradientSummary(
            self._count, self._mean if self._count else math.nan, std, self._peak[0], self._peak[1],
            tuple(self._vanishing), tuple(self._exploding), balance, self.unit,
        )  # fmt: skip


def _listed(names: Sequence[str]) -> str:
    if not names:
        return "none"
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more
