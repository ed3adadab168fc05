"""The examples of a rule as charts: readings on which it stays quiet, and readings on which it fires."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from forewarn.catalogue import Scope
from forewarn.judge.examples import Example, examples
from forewarn.judge.judgement import Judge, RuleSet
from forewarn.judge.ledger import Ledger
from forewarn.judge.registry import Rule
from forewarn.metrics import find, label
from forewarn.types import Alert, figure
from forewarn.views.bars import BARS, BarScale, course
from forewarn.views.wording import STYLES, mark, value_words

WIDEST = 40
"""Maximum columns of a chart; more add nothing."""
_NARROWEST = 16
_INDENT = "  "
_LOG = " (log scale)"

Series = tuple[float | None, ...]


def example_lines(rule: Rule, width: int, bars: str = BARS) -> list[RenderableType]:
    """A quiet and a firing example, one chart per series, drawn to the same scale."""
    pair = _pair(examples(rule))
    readings: dict[str, list[float]] = {}
    for example in pair:
        for (metric, _), series in example.series.items():
            readings.setdefault(metric, []).extend(value for value in series if value is not None)
    scales = {metric: BarScale.of(values) for metric, values in readings.items()}
    rows = [[(_name(*key), _ends(key[0], series) + (_LOG if scales[key[0]].is_logarithmic else ""))
             for key, series in example.series.items()] for example in pair]  # fmt: skip
    names, values = (max(len(row[index]) for part in rows for row in part) for index in (0, 1))
    room = width - names - values - 3 * len(_INDENT)
    is_narrow = room < _NARROWEST  # then the name and the values go above the chart
    margin = _INDENT if is_narrow else f"{_INDENT}{'':<{names}}{_INDENT}"
    lines: list[RenderableType] = []
    for example, part in zip(pair, rows, strict=True):
        num_steps = max(map(len, example.series.values()))
        columns = _columns(num_steps, min(WIDEST, width - len(_INDENT) if is_narrow else room))
        lines.append(_title(rule, example))
        for ((metric, _), series), (name, ends) in zip(example.series.items(), part, strict=True):
            padded = (*series, *[None] * (num_steps - len(series)))
            picture = course(padded, columns, scales[metric], bars)
            if is_narrow:
                lines += [Padding(Text(f"{name}: {ends}"), (0, 0, 0, len(_INDENT))), Text(margin + picture.rstrip())]
            else:
                lines.append(Text(f"{_INDENT}{name:<{names}}{_INDENT}{picture}{_INDENT}{ends}"))
        lines.append(Text(margin + _axis(num_steps, columns), style="dim"))
        lines += [Text(f"{_INDENT}{words}", style="dim") for words in _declared(example)]
        lines.append(Text())
    return lines[:-1]


def _columns(num_steps: int, most: int) -> int:
    """The width of a chart, with the same number of columns for each step."""
    return num_steps * (most // num_steps) if num_steps <= most else most


def _pair(all_examples: Sequence[Example]) -> list[Example]:
    """A quiet example and the first one that fires, with the same series if possible."""
    fires = next(example for example in all_examples if example.fires)
    quiet = [example for example in all_examples if not example.fires]
    alike = [example for example in quiet if example.series.keys() == fires.series.keys()]
    return [(alike or quiet)[0], fires]


def _title(rule: Rule, example: Example) -> Text:
    if not example.fires:
        return Text.assemble(("Stays quiet", "bold green"))
    alert = _first_alert(rule, example)
    if alert is None:
        return Text("Fires", style="bold red")
    sign = Text(f"{mark(alert.severity)} Fires at step {alert.fired}", style=STYLES[alert.severity])
    return Text.assemble(sign, f"  {alert.headline}" if alert.headline else "")


def _first_alert(rule: Rule, example: Example) -> Alert | None:
    """The rule's first alert on an example."""
    rule_set = RuleSet.of([rule])
    history, judge, ledger = rule_set.history(example.info), Judge(rule_set, example.info), Ledger([rule])
    for step, blocks in example.steps():
        changed = ledger.update(judge(step, history, history.append(blocks)), history, example.info)
        if changed:
            return changed[0]
    return None


def _name(metric: str, scope: str) -> str:
    declared = find(metric)
    if declared is not None and declared.scope is Scope.GROUP:
        return f"{label(metric)} of group {scope}"
    return f"{label(metric)} of {scope}" if scope else label(metric)


def _ends(metric: str, series: Series) -> str:
    """The first and last value, with the one furthest outside their range in between: `30 → 900 → 30`."""
    readings = [value for value in series if value is not None]
    first, last = readings[0], readings[-1]
    low, high = min(first, last), max(first, last)
    beyond = max(readings, key=lambda value: max(low - value, value - high) if math.isfinite(value) else math.inf)
    shown = [first, beyond, last] if not low <= beyond <= high and math.isfinite(first + last) else [first, last]
    words = [value_words(metric, value) for value in shown]
    return words[0] if len(set(words)) == 1 else " → ".join(words)


def _axis(num_steps: int, width: int) -> str:
    """The first and last step of the chart: `step 0              151`."""
    last = f"{num_steps - 1}"
    return f"step 0{last:>{width - 6}}" if num_steps > 1 and width >= 8 + len(last) else "step 0"


def _declared(example: Example) -> list[str]:
    """The user's declarations in the example."""
    numbers = [f"{name} = {figure(value)}" for name, value in example.hyperparameters.items()]
    ranges = [f"healthy range of {name}: {figure(low)} to {figure(high)}"
              for name, (low, high) in example.healthy.items()]  # fmt: skip
    return [f"with {', '.join(numbers)}"] * bool(numbers) + ranges
