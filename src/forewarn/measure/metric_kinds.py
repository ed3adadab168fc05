"""Metrics of activations, parameters and gradients, and which modules or parameters each applies to."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import numpy as np
from torch import Tensor, nn

from forewarn.measure.engine import QUANTITIES, summarize
from forewarn.measure.probe import Array

Reduce = Literal["l2", "mean", "sum", "max"]
Aggregate = Callable[[Any], Any]
"""Takes all values of a step (one flat tensor; scalars as a list) and returns a number, or numbers by suffix."""

BUILT_IN = (*QUANTITIES, "abs_max", "rms")
"""Metrics that the statistics engine computes for all tensors at once; `std` divides by n, as in all of forewarn."""


@dataclass(frozen=True, slots=True)
class ModuleMetric:
    """A named metric of one of the five kinds below.

    `fn` is a function of the tensor, or the name of a built-in metric; by default, the built-in metric called `name`.
    """

    kind: ClassVar[str] = ""
    """What the metric is computed from; also the first part of every key."""

    name: str
    fn: Callable[..., Tensor | float] | str | None = None
    regex: str = ".*"
    """Matched from the start of the module's or parameter's name, as written in the key."""
    aggregate: Aggregate | None = None
    """How to combine the micro-batches of a step; by default the mean over all elements."""
    reduce: Reduce | None = None
    """How to combine the values of a tensor's shards; built-in metrics do not need it."""
    healthy: tuple[float | None, float | None] | None = None
    """In a watched run: the lowest and highest healthy value, None for no bound; a value outside raises an alert."""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"a metric needs a name, not {self.name!r}")
        try:
            re.compile(self.regex)
        except re.error as error:
            raise ValueError(f"metric {self.name!r}: {self.regex!r} is not a regular expression: {error}") from None
        if not callable(self.fn) and self.built_in not in BUILT_IN:
            raise ValueError(
                f"metric {self.name!r}: {self.built_in!r} is not a built-in metric; give a function, or one of "
                + ", ".join(BUILT_IN)
            )
        if self.reduce is not None and self.reduce not in get_args(Reduce):
            raise ValueError(
                f"metric {self.name!r}: reduce={self.reduce!r} must be one of {', '.join(get_args(Reduce))}"
            )
        if self.healthy is not None and not _is_range(self.healthy):
            raise ValueError(
                f"metric {self.name!r}: healthy={self.healthy!r} must be the lowest and the highest healthy value, "
                "such as (0, 10); None stands for no bound"
            )

    @property
    def range(self) -> tuple[float, float]:
        """The healthy range, infinite where no bound is declared."""
        low, high = self.healthy or (None, None)
        return -math.inf if low is None else float(low), math.inf if high is None else float(high)

    @property
    def compared_with(self) -> nn.Module | None:
        """The reference that a difference metric was declared with."""
        return getattr(self, "reference", None)

    @property
    def built_in(self) -> str | None:
        """The statistics engine's name for this metric; None for a function."""
        if callable(self.fn):
            return None
        return self.name if self.fn is None else self.fn


@dataclass(frozen=True, slots=True)
class ActivationMetric(ModuleMetric):
    """A metric of a module's output: `fn(activation)`."""

    kind = "activation"


@dataclass(frozen=True, slots=True)
class ActivationDifferenceMetric(ModuleMetric):
    """A metric of a module's output and the reference's for the same input: `fn(activation, reference)`."""

    kind = "activation_difference"
    reference: nn.Module | None = field(default=None, repr=False, kw_only=True)
    """In a watched run: the model to compare with, in evaluation mode; the monitor runs it on the model's input."""


@dataclass(frozen=True, slots=True)
class ParameterMetric(ModuleMetric):
    """A metric of a parameter: `fn(parameter)` returns one number."""

    kind = "parameter"


@dataclass(frozen=True, slots=True)
class ParameterDifferenceMetric(ModuleMetric):
    """A metric of a parameter and the reference's: `fn(parameter, reference)` returns one number."""

    kind = "parameter_difference"
    reference: nn.Module | None = field(default=None, repr=False, kw_only=True)
    """In a watched run: the model to compare with, read at each measured step; by default the initial weights."""


@dataclass(frozen=True, slots=True)
class GradientMetric(ModuleMetric):
    """A metric of a parameter's gradient: `fn(gradient)` returns one number."""

    kind = "gradient"


Keys = tuple[tuple[str, str], ...]
"""The keys to fill from one row of the statistics engine, each with its quantity."""


class Asked(NamedTuple):
    """The metrics of one activation, parameter or gradient, each with its key."""

    built_in: Keys = ()
    functions: tuple[tuple[str, ModuleMetric], ...] = ()
    aggregates: tuple[tuple[str, Aggregate], ...] = ()
    """The aggregation functions of built-in metrics that have one."""


NOTHING = Asked()


class Metrics:
    """All metrics of a monitor; one that fails is switched off."""

    def __init__(self, separator: str = "/") -> None:
        """`separator` stands between the parts of a key: kind, name of the module or parameter, name of the metric."""
        self.separator = separator
        self._all: dict[tuple[str, str], ModuleMetric] = {}
        self._off: set[tuple[str, str]] = set()
        self._asked: dict[tuple[str, str, str, nn.Module | None], Asked] = {}

    def __iter__(self) -> Iterator[ModuleMetric]:
        """The metrics that have not failed."""
        return (metric for place, metric in self._all.items() if place not in self._off)

    def add(self, metric: ModuleMetric) -> None:
        place = (metric.kind, metric.name)
        if place in self._all:
            kind = metric.kind.replace("_", " ").capitalize()
            raise ValueError(f"{kind} metric {metric.name} already exists; give this one another name")
        self._all[place] = metric
        self._asked.clear()

    def switch_off(self, metric: ModuleMetric) -> None:
        self._off.add((metric.kind, metric.name))
        self._asked.clear()

    def any(self, *kinds: str) -> bool:
        """Whether there are metrics of these kinds."""
        return any(kind in kinds for kind, _ in self._all.keys() - self._off)

    def built_in(self, kind: str, name: str, reference: nn.Module | None = None) -> list[ModuleMetric]:
        """The built-in metrics of one kind that apply to the module or parameter of this name."""
        return [metric for metric in self._matching(kind, name, reference) if metric.built_in]

    def asked(self, kind: str, name: str, prefix: str = "", reference: nn.Module | None = None) -> Asked:
        """The metrics of one kind that apply to the module or parameter of this name, in the order they were added.

        Keys begin with `prefix`, by default the kind. `reference` is the one that the metrics were declared with.
        """
        asked = self._asked.get((kind, name, prefix, reference))
        if asked is None:
            asked = self._asked[kind, name, prefix, reference] = self._new_asked(kind, name, prefix or kind, reference)
        return asked

    def _matching(self, kind: str, name: str, reference: nn.Module | None) -> list[ModuleMetric]:
        candidates = (metric for metric in self if metric.kind == kind and metric.compared_with is reference)
        return [metric for metric in candidates if re.match(metric.regex, name)]

    def _new_asked(self, kind: str, name: str, prefix: str, reference: nn.Module | None) -> Asked:
        metrics = self._matching(kind, name, reference)
        matching = [(self.separator.join((prefix, name, metric.name)), metric) for metric in metrics]
        asked = Asked(
            tuple((key, metric.built_in) for key, metric in matching if metric.built_in),
            tuple((key, metric) for key, metric in matching if not metric.built_in),
            tuple((key, metric.aggregate) for key, metric in matching if metric.built_in and metric.aggregate),
        )
        return NOTHING if asked == NOTHING else asked  # always the same object, so callers can use `is`


def _is_range(value: Any) -> bool:
    """Whether a value is a pair of a lowest and a highest number, either of which may be None."""
    if not isinstance(value, tuple | list) or len(value) != 2:
        return False
    low, high = value
    if any(not (bound is None or isinstance(bound, Real)) for bound in value):
        return False
    try:
        least, most = (math.inf * sign if bound is None else float(bound) for sign, bound in ((-1, low), (1, high)))
    except OverflowError:
        return False
    return least <= most


def quantities(rows: Array) -> Mapping[str, Any]:
    """Every built-in metric of each row of the statistics engine."""
    columns: dict[str, Any] = dict(summarize(rows))
    with np.errstate(all="ignore"):
        columns["abs_max"] = np.maximum(np.abs(columns["min"]), np.abs(columns["max"]))
        columns["rms"] = np.sqrt(rows[:, 2] / (rows[:, 0] - rows[:, 6]))
    return columns
