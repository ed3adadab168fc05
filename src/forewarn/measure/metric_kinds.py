"""What a metric is: a question about every activation, parameter or gradient, and which of them it is asked of."""

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
"""From all values of a step (one flat tensor; scalars as a list) to a number or a mapping of suffixes to numbers."""

BUILT_IN = (*QUANTITIES, "abs_max", "rms")
"""Metrics that the statistics engine computes for all tensors at once; `std` divides by n, as in all of forewarn."""


@dataclass(frozen=True, slots=True)
class ModuleMetric:
    """One question under a name, of one of the five kinds below.

    `fn` is a function of the tensor, or the name of a built-in metric: by default the one that is called `name`.
    """

    kind: ClassVar[str] = ""
    """The first part of every key, and of what the metric is computed."""

    name: str
    fn: Callable[..., Tensor | float] | str | None = None
    regex: str = ".*"
    """Matched from the start of the name of the module or parameter, as it stands in the key."""
    aggregate: Aggregate | None = None
    """Over the micro-batches of a step; by default the mean over all elements."""
    reduce: Reduce | None = None
    """How the values of the shards of one tensor make the value of the whole; a built-in metric knows it by itself."""
    healthy: tuple[float | None, float | None] | None = None
    """In a watched run: the lowest and the highest value that are well, None for no bound; beyond, an alert tells."""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"a metric needs a name, not {self.name!r}")
        try:
            re.compile(self.regex)
        except re.error as error:
            raise ValueError(f"metric {self.name!r}: {self.regex!r} is not a regular expression: {error}") from None
        if not callable(self.fn) and self.built_in not in BUILT_IN:
            raise ValueError(
                f"metric {self.name!r}: {self.built_in!r} is no built-in metric; give a function, or one of "
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
        """What is healthy, infinite where nothing is declared."""
        low, high = self.healthy or (None, None)
        return -math.inf if low is None else float(low), math.inf if high is None else float(high)

    @property
    def compared_with(self) -> nn.Module | None:
        """The reference that a difference metric was declared with."""
        return getattr(self, "reference", None)

    @property
    def built_in(self) -> str | None:
        """The quantity of the statistics engine that this metric is, if it is one."""
        if callable(self.fn):
            return None
        return self.name if self.fn is None else self.fn


@dataclass(frozen=True, slots=True)
class ActivationMetric(ModuleMetric):
    """Of what a module returns: `fn(activation)`."""

    kind = "activation"


@dataclass(frozen=True, slots=True)
class ActivationDifferenceMetric(ModuleMetric):
    """Of what a module and its twin in the reference return for the same input: `fn(activation, reference)`."""

    kind = "activation_difference"
    reference: nn.Module | None = field(default=None, repr=False, kw_only=True)
    """In a watched run: what is compared with, in evaluation mode; it runs by itself on what the model is given."""


@dataclass(frozen=True, slots=True)
class ParameterMetric(ModuleMetric):
    """Of a parameter: `fn(parameter)`, one number."""

    kind = "parameter"


@dataclass(frozen=True, slots=True)
class ParameterDifferenceMetric(ModuleMetric):
    """Of a parameter and the reference's: `fn(parameter, reference)`, one number."""

    kind = "parameter_difference"
    reference: nn.Module | None = field(default=None, repr=False, kw_only=True)
    """In a watched run: what is compared with, as it is at each measured step; by default the weights at attaching."""


@dataclass(frozen=True, slots=True)
class GradientMetric(ModuleMetric):
    """Of a parameter's gradient: `fn(gradient)`, one number."""

    kind = "gradient"


Keys = tuple[tuple[str, str], ...]
"""The keys that are asked of one row of the statistics engine, each with its quantity."""


class Asked(NamedTuple):
    """What is asked of one activation, parameter or gradient, each with the key of its answer."""

    built_in: Keys = ()
    functions: tuple[tuple[str, ModuleMetric], ...] = ()
    aggregates: tuple[tuple[str, Aggregate], ...] = ()
    """Of built-in metrics that have one."""


NOTHING = Asked()


class Metrics:
    """All metrics of a monitor, each until it fails."""

    def __init__(self, separator: str = "/") -> None:
        """`separator` stands between the parts of a key: kind, name of the module or parameter, name of the metric."""
        self.separator = separator
        self._all: dict[tuple[str, str], ModuleMetric] = {}
        self._off: set[tuple[str, str]] = set()
        self._asked: dict[tuple[str, str, str, nn.Module | None], Asked] = {}

    def __iter__(self) -> Iterator[ModuleMetric]:
        """Those that have not failed."""
        return (each for place, each in self._all.items() if place not in self._off)

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
        """The metrics of one kind that the statistics engine answers for the module or parameter of this name."""
        return [each for each in self._matching(kind, name, reference) if each.built_in]

    def asked(self, kind: str, name: str, prefix: str = "", reference: nn.Module | None = None) -> Asked:
        """What the metrics of one kind ask of the module or parameter of this name, in the order of adding.

        Keys begin with `prefix`, by default the kind. `reference` is the one that the metrics were declared with.
        """
        known = self._asked.get((kind, name, prefix, reference))
        if known is None:
            known = self._asked[kind, name, prefix, reference] = self._found(kind, name, prefix or kind, reference)
        return known

    def _matching(self, kind: str, name: str, reference: nn.Module | None) -> list[ModuleMetric]:
        alike = (each for each in self if each.kind == kind and each.compared_with is reference)
        return [each for each in alike if re.match(each.regex, name)]

    def _found(self, kind: str, name: str, prefix: str, reference: nn.Module | None) -> Asked:
        several = self._matching(kind, name, reference)
        matching = [(self.separator.join((prefix, name, each.name)), each) for each in several]
        asked = Asked(
            tuple((key, each.built_in) for key, each in matching if each.built_in),
            tuple((key, each) for key, each in matching if not each.built_in),
            tuple((key, each.aggregate) for key, each in matching if each.built_in and each.aggregate),
        )
        return NOTHING if asked == NOTHING else asked  # always the same object, so callers can use `is`


def _is_range(given: Any) -> bool:
    """Whether something is a lowest and a highest value, either of which may be None."""
    if not isinstance(given, tuple | list) or len(given) != 2:
        return False
    low, high = given
    if any(not (each is None or isinstance(each, Real)) for each in given):
        return False
    try:
        least, most = (math.inf * sign if each is None else float(each) for sign, each in ((-1, low), (1, high)))
    except OverflowError:
        return False
    return least <= most


def quantities(rows: Array) -> Mapping[str, Any]:
    """Every built-in metric of each row of the statistics engine."""
    found: dict[str, Any] = dict(summarize(rows))
    with np.errstate(all="ignore"):
        found["abs_max"] = np.maximum(np.abs(found["min"]), np.abs(found["max"]))
        found["rms"] = np.sqrt(rows[:, 2] / (rows[:, 0] - rows[:, 6]))
    return found
