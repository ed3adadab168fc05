"""The properties of a metric, and a catalogue that looks them up by name."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from forewarn.types import is_metric_name

TRACKER_PREFIX = "forewarn/"
"""What stands before the name of a metric in the user's own tracker, where other names may be the same."""


class Scope(StrEnum):
    """What one value of a metric belongs to."""

    RUN = "run"
    MODEL = "model"
    """All tensors or blocks of the model together."""
    MONITOR = "monitor"
    GROUP = "optimizer group"
    OPTIMIZER = "optimizer"
    PARAMETER = "parameter"
    MODULE = "module"
    HEAD = "attention head"
    BLOCK = "block"
    EXPERT = "expert"
    TASK = "task"
    TASK_PAIR = "pair of tasks"
    PHASE = "phase"
    """A part of a step's time, or a kind of pause."""
    METRIC = "metric"
    PROBE = "probe"
    RULE = "rule"
    RANK = "rank"
    VARIABLE = "variable"
    """A local variable of the training script."""


class Cadence(StrEnum):
    """When a metric has a new value."""

    EVERY_STEP = "every step"
    MEASURED = "measured steps"
    EPOCH = "end of epoch"
    EVENT = "when it happens"


class Reduce(StrEnum):
    """How values are combined over ranks, if each rank has its own batch or its own shard of a tensor."""

    SUM = "sum"
    MEAN = "mean"
    MIN = "min"
    MAX = "max"
    L2 = "l2"
    """Square root of the sum of squares."""
    SAME = "same"
    """Equal on all ranks."""
    DERIVED = "derived"
    """Recomputed from sums, counts or other metrics after these were reduced."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. A `*` in place of the quantity stands for every name in the family that is not declared itself."""

    name: str
    """`family/quantity`."""
    scope: Scope
    cadence: Cadence
    unit: str
    """Such as `s` or `bytes`. `share` is a fraction of 1, `flag` is 0 or 1, a `code` stands for a word."""
    reduce: Reduce
    meaning: str
    """One sentence."""
    healthy: tuple[float | None, float | None] | None = None
    """The lowest and highest value that are healthy in any run; None for no limit. Limits that depend on the run are
    left to rules."""
    words: str = ""
    """Its label in front of a number; by default its name in words."""
    loggable: bool = False
    """Whether a training loop may record it with `monitor.log`."""
    heading: str = ""
    """Its name over a chart; by default its label."""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not is_metric_name(self.name.replace("*", "any")):
            raise ValueError(f"a metric name must be family/quantity, such as 'loader/queue_length', not {self.name!r}")
        if self.healthy is not None:
            object.__setattr__(self, "healthy", _checked_range(self.name, self.healthy))
        for field, kind in (("scope", Scope), ("cadence", Cadence), ("reduce", Reduce)):
            try:
                object.__setattr__(self, field, kind(getattr(self, field)))
            except ValueError:
                words = ", ".join(map(repr, map(str, kind)))
                raise ValueError(f"{field}={getattr(self, field)!r} of {self.name} must be one of {words}") from None

    @property
    def family(self) -> str:
        return self.name.partition("/")[0]

    @property
    def label(self) -> str:
        return self.words or self.name.replace("/", " ").replace("_", " ")

    @property
    def title(self) -> str:
        """Its heading, or else its label, with a capital letter."""
        text = self.heading or self.label
        return text[:1].upper() + text[1:]

    def to_plain(self) -> dict[str, Any]:
        """The fields as plain values that JSON can store."""
        return {name: str(value) if isinstance(value, StrEnum) else value for name, value in asdict(self).items()}

    def is_healthy(self, value: float) -> bool:
        """Whether a value is in the healthy range; always true without a range."""
        low, high = self.healthy or (None, None)
        return (low is None or value >= low) and (high is None or value <= high)


def _checked_range(name: str, healthy: Any) -> tuple[float | None, float | None]:
    is_pair = isinstance(healthy, list | tuple) and len(healthy) == 2
    if not is_pair or not all(bound is None or isinstance(bound, int | float) for bound in healthy):
        raise ValueError(f"healthy={healthy!r} of {name} must be the lowest and the highest value, such as (0, 1)")
    low, high = healthy
    return low, high


class Catalogue:
    """Metrics by name, with lookups for any name."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self.metrics = tuple(metrics)
        self.families = tuple(dict.fromkeys(metric.family for metric in self.metrics))
        """The first parts of the names, in order."""
        self._by_name = {metric.name: metric for metric in self.metrics}
        if len(self._by_name) < len(self.metrics):
            names = [metric.name for metric in self.metrics]
            raise ValueError(f"the metric {max(names, key=names.count)!r} is declared twice; remove one of them")

    def extended(self, metrics: Iterable[Metric]) -> Catalogue:
        """This catalogue plus these metrics, except those in families that it already has."""
        return Catalogue([*self.metrics, *(metric for metric in metrics if metric.family not in self.families)])

    def find(self, name: str) -> Metric | None:
        """The metric with this name, or the `*` metric of its family; None if there is neither."""
        return self._by_name.get(name) or self._by_name.get(f"{name.partition('/')[0]}/*")

    def label(self, name: str) -> str:
        """The label of a metric in front of a number; its name if the catalogue does not declare it."""
        metric = self.find(name)
        return name if metric is None or metric.name != name else metric.label

    def title(self, name: str) -> str:
        """The name of a metric over a chart; its name if the catalogue does not declare it."""
        metric = self.find(name)
        return name if metric is None or metric.name != name else metric.title

    def is_reserved(self, name: str) -> bool:
        """Whether only probes may record under this name: true in built-in families, except for loggable metrics."""
        metric = self.find(name)
        return name.partition("/")[0] in self.families if metric is None else not metric.loggable

    def unknown(self, names: Iterable[str]) -> list[str]:
        """The names, or patterns such as `*_metric/*`, that are missing although their family is declared.

        Unknown families belong to the user, with all names in them.
        """
        return [
            name
            for name in names
            if not (self.find(name) or fnmatch.filter(self._by_name, name)) and name.partition("/")[0] in self.families
        ]
