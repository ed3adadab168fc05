"""The examples in rule documentation: short series, and whether the rule fires on them.

A line is `fires:` or `quiet:` and one or more series, separated by `|`. A series is a metric, a scope in braces if it
has one, and its values, starting at step 0. Without a name, it is the first metric that the rule reads.

    fires: 2.0+0.001x150 9.0 9.0
    quiet: update/ratio{layer.weight} 0.5x2 0.01x3 | train/lr{0} 1e-3x5

Values are numbers, `nan` and `inf`. `2.0x5` is 2.0 five times. `2.0+0.5x3` is 2.0 2.5 3.0: the count is the number of
values (Prometheus writes one more). `_` is a step without a reading, and `_x5` is five of them. A scope with a dot is a
parameter: a vector if it ends in `.bias`, otherwise an 8 × 8 matrix in a `Linear`. `facts/NAME` and a number is not a
series but a declared hyperparameter, such as `facts/total_steps 1000`. `healthy/METRIC` and two numbers declare the
healthy range of a user's own metric.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from forewarn.types import Block, ParameterInfo, RunInfo, is_metric_name

if TYPE_CHECKING:
    from forewarn.judge.registry import Rule

_NUMBER = r"(?:\d+\.?\d*(?:e[+-]?\d+)?|nan|inf)"
_TOKEN = re.compile(rf"(?:_|(?P<start>[+-]?{_NUMBER})(?:(?P<step>[+-]{_NUMBER})(?=x))?)(?:x(?P<count>\d+))?")
_WORD = re.compile(r"(?:\{[^}]*\}|\S)+")
_NAME = re.compile(r"(?P<metric>[a-z][^\s{}]*/[^\s{}]+)(?:\{(?P<scope>[^}]*)\})?")
_SIZE = 8
_DECLARED = "facts/"
_GROUP = "group/"
_HALF = "half."
"""Parameters below a module of this name are in float16."""
_UNTRAINED = "target."
"""Parameters below a module of this name are in no optimizer group."""
_HEALTHY = "healthy/"


@dataclass(frozen=True, slots=True)
class Example:
    """One line of an example: readings, and whether the rule fires on them."""

    fires: bool
    text: str
    series: dict[tuple[str, str], tuple[float | None, ...]]
    """By metric and scope; None where there is no reading."""

    hyperparameters: dict[str, float]
    healthy: dict[str, tuple[float, float]]
    """The declared healthy ranges, by metric."""
    group: dict[str, float]
    """The settings of the optimizer group."""

    @property
    def info(self) -> RunInfo:
        """The parameters that the scopes name, and the declared values."""
        scopes = dict.fromkeys(scope for _, scope in self.series if "." in scope)
        return RunInfo(
            parameters={scope: _parameter(scope) for scope in scopes}, hyperparameters=dict(self.hyperparameters),
            metrics=dict(self.healthy), groups=(dict(self.group),) if self.group else (),
        )  # fmt: skip

    def steps(self) -> Iterator[tuple[int, list[Block]]]:
        """The readings, step by step."""
        for step in range(max(map(len, self.series.values()))):
            readings: dict[str, dict[str, float]] = {}
            for (metric, scope), values in self.series.items():
                value = values[step] if step < len(values) else None
                if value is not None:
                    readings.setdefault(metric, {})[scope] = value
            yield (
                step,
                [
                    Block(step, float(step), metric, tuple(scoped), np.array(list(scoped.values()), np.float32))
                    for metric, scoped in readings.items()
                ],
            )


def examples(rule: Rule) -> tuple[Example, ...]:
    """The examples in the documentation of a rule."""
    return tuple(parse(line, rule.reads[0]) for line in example_lines(rule.documentation))


def example_lines(documentation: str) -> list[str]:
    """The lines of a docstring that are examples."""
    lines = map(str.strip, documentation.splitlines())
    return [line for line in lines if line.startswith(("fires:", "quiet:"))]


def parse(line: str, default_metric: str) -> Example:
    """An example from its line. Raises ValueError with the part that cannot be read."""
    kind, _, text = line.partition(":")
    if kind not in ("fires", "quiet"):
        raise ValueError(f"an example begins with 'fires:' or 'quiet:', not {line!r}")
    series: dict[tuple[str, str], tuple[float | None, ...]] = {}
    for part in text.split("|"):
        words = _WORD.findall(part)
        metric, scope = default_metric, ""
        if words and (named := _NAME.fullmatch(words[0])):
            metric, scope = named["metric"], named["scope"] or ""
            words = words[1:]
        if not words or not is_metric_name(metric) or (metric, scope) in series:
            raise ValueError(f"{part.strip()!r} in {line!r} is no series: a metric, once, then its values")
        series[metric, scope] = tuple(value for word in words for value in _values(word, line))
    declared: dict[str, float] = {}
    healthy: dict[str, tuple[float, float]] = {}
    group: dict[str, float] = {}
    readings: dict[tuple[str, str], tuple[float | None, ...]] = {}
    for (metric, scope), values in series.items():
        match values:
            case [float(value), *_] if metric.startswith(_DECLARED):
                declared[metric.removeprefix(_DECLARED)] = value
            case [float(value), *_] if metric.startswith(_GROUP):
                group[metric.removeprefix(_GROUP)] = value
            case [float(low), float(high)] if metric.startswith(_HEALTHY):
                healthy[metric.removeprefix(_HEALTHY)] = (low, high)
            case _:
                readings[metric, scope] = values
    return Example(kind == "fires", text.strip(), readings, declared, healthy, group)


def _values(word: str, line: str) -> list[float | None]:
    token = _TOKEN.fullmatch(word)
    if token is None:
        raise ValueError(f"{word!r} in {line!r} is no value: expected 2.0, 2.0x5, 2.0+0.5x3, nan, inf or _")
    count = int(token["count"] or 1)
    if token["start"] is None:
        return [None] * count
    start, step = float(token["start"]), float(token["step"] or 0)
    return [start + index * step if index else start for index in range(count)]


def _parameter(scope: str) -> ParameterInfo:
    name = scope.rpartition(".")[2]
    shape = (_SIZE,) if name == "bias" else (_SIZE, _SIZE)
    dtype = "float16" if scope.startswith(_HALF) else "float32"
    return ParameterInfo(shape, f"Linear.{name}", dtype, None if scope.startswith(_UNTRAINED) else 0, True)
