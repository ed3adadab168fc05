"""Summaries of gradient norms: vanishing and exploding layers, task collapse, totals over a run.

Plain arithmetic on norms that were measured elsewhere; neither torch nor a model is needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, TypeVar

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


Result = TypeVar("Result")


def also_named(**others: str) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """Let a function take parameters by the names that they have elsewhere too, given as `other="ours"`."""

    def renaming(function: Callable[..., Result]) -> Callable[..., Result]:
        @wraps(function)
        def called(*args: Any, **keywords: Any) -> Result:
            for other in others.keys() & keywords.keys():
                if others[other] in keywords:
                    raise TypeError(f"{function.__name__}: {others[other]} and {other} are the same; give one of them")
                keywords[others[other]] = keywords.pop(other)
            return function(*args, **keywords)

        return called

    return renaming


@also_named(gradient_norms="norms")
def detect_vanishing_gradients(norms: Mapping[str, float], threshold: float = VANISHING) -> list[str]:
    """The layers whose gradient norm is below `threshold`; `norms` may be called `gradient_norms`."""
    return [name for name, norm in norms.items() if norm < threshold]


@also_named(gradient_norms="norms")
def detect_exploding_gradients(norms: Mapping[str, float], threshold: float = EXPLODING) -> list[str]:
    """The layers whose gradient norm is above `threshold`, or not finite; `norms` may be called `gradient_norms`."""
    return [name for name, norm in norms.items() if not norm <= threshold]


@also_named(gradient_ratios="ratios")
def detect_task_collapse(
    ratios: Sequence[float], window_size: int = WINDOW, collapse_threshold: float = COLLAPSE
) -> tuple[bool, str]:
    """Whether one of two tasks has taken over, and a sentence about it.

    `ratios` are gradient norms of the first task divided by those of the second. The mean of the last `window_size` is
    compared with the threshold and its inverse. The rule T102 does the same on a log scale, and names the tasks.
    `ratios` may also be called `gradient_ratios`.
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
    layer_mean: float = math.nan
    """Mean norm over all layers and checks."""
    layer_max: float = math.nan
    """Largest norm of any layer at any check."""
    layer_max_in: str = ""
    """The layer that had it."""
    collapsed: bool = False
    """Whether one of two tasks dominates the last checks by more than a factor of 5."""

    def rows(self) -> list[tuple[str, str]]:
        """Labels and values."""
        norm = "not enough data"
        if self.count:
            norm = f"mean {in_words(self.mean)} ± {in_words(self.std)}, "
            norm += f"highest {in_words(self.peak)} in {self.unit} {self.peak_at}"
        layers = "not enough data"
        if self.layer_max_in:
            layers = f"mean {in_words(self.layer_mean)}, "
            layers += f"highest {in_words(self.layer_max)} in {_printable(self.layer_max_in)}"
        return [
            ("gradient norm", norm),
            ("norm of a layer", layers),
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
    _layer_norms: tuple[float, int] = (0.0, 0)
    """Sum and number of the finite norms of layers."""
    _layer_peak: tuple[float, str] = (-math.inf, "")

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
        finite = {name: norm for name, norm in norms.items() if math.isfinite(norm)}
        total, count = self._layer_norms
        self._layer_norms = (total + sum(finite.values()), count + len(finite))
        peaks = ((norm, name) for name, norm in finite.items())
        self._layer_peak = max([self._layer_peak, *peaks], key=lambda peak: peak[0])

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
        collapsed = len(self._ratios) == WINDOW and not 1 / COLLAPSE <= self.mean_ratio <= COLLAPSE
        if collapsed:
            winner = "first" if self.mean_ratio > 1 else "second"
            balance = f"collapsed, the {winner} task dominates: {pair} {ratio} over the last {WINDOW} checks"
        elif len(self._ratios) == WINDOW:
            balance = f"{words}: {pair} {ratio} over the last {WINDOW} checks"
        elif self._ratios:
            balance = f"{TOO_EARLY} ({len(self._ratios)} of {WINDOW} checks): {pair} {ratio} so far, {words}"
        total, count = self._layer_norms
        std = math.sqrt(self._squares / (self._count - 1)) if self._count > 1 else 0.0
        return GradientSummary(
            self._count, self._mean if self._count else math.nan, std, self._peak[0], self._peak[1],
            tuple(self._vanishing), tuple(self._exploding), balance, self.unit,
            total / count if count else math.nan, self._layer_peak[0] if count else math.nan, self._layer_peak[1],
            collapsed,
        )  # fmt: skip


def layers_in_words(norms: Mapping[str, float]) -> str:
    """`layers: mean 0.12, max 0.4 in 2.weight`, of those that are finite."""
    finite = {name: norm for name, norm in norms.items() if math.isfinite(norm)}
    if not finite:
        return "no layer has a finite gradient"
    highest = max(finite, key=finite.__getitem__)
    mean = sum(finite.values()) / len(finite)
    return f"layers: mean {in_words(mean)}, max {in_words(finite[highest])} in {_printable(highest)}"


def _listed(names: Sequence[str]) -> str:
    if not names:
        return "none"
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(map(_printable, names[:MOST_NAMES])) + more


def _printable(name: str) -> str:
    """A layer's name, its control characters escaped."""
    return name if name.isprintable() else name.encode("unicode_escape").decode()
