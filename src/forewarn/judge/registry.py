"""What a rule is, and how it is declared."""

from __future__ import annotations

import inspect
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from string import Formatter
from typing import Any

from forewarn.judge.examples import example_lines, parse
from forewarn.judge.families import BY_LETTER, Family
from forewarn.judge.headlines import Message
from forewarn.judge.history import History
from forewarn.judge.remedies import Prescription
from forewarn.judge.series import Bools
from forewarn.judge.upcoming import Lookahead, Upcoming, both
from forewarn.metrics import label, unknown
from forewarn.settings import Settings
from forewarn.types import Finding, RunInfo, Severity, is_metric_name, spelled_out

NO_BOUND = math.nan
"""The bound of a finding without a comparison. Its value is a flag or a code, and no view shows either."""

_SECTIONS = ["## Why is this bad?", "## Example"]
_GIVEN_BY_NAME = ("settings", "info", "metric")
"""Optional parameters of a check, besides what it reads."""

Check = Callable[..., Finding | Iterable[Finding] | None]
Judging = Callable[[int, History, Iterable[str]], list[Finding] | None]
Gate = Callable[[int, float, History], bool]
"""Whether a finding is possible at a step on which one metric in `when` has this new value, after this history.

The value is NaN if the metric is not of the run as a whole."""


@dataclass(frozen=True, slots=True)
class Outside:
    """A gate that opens when the value is not between two bounds; a NaN opens it."""

    low: float = -math.inf
    high: float = math.inf

    def __call__(self, step: int, value: float, history: History) -> bool:
        return not self.low <= value <= self.high

    def lookahead(self, metric: str, upcoming: Upcoming) -> Bools | None:
        """At which upcoming readings it opens."""
        values = upcoming.whole(metric)
        return None if values is None else ~((self.low <= values) & (values <= self.high))


@dataclass(frozen=True, slots=True)
class Since:
    """A gate that opens at a step, and stays open; never if the step is NaN."""

    step: float

    def __call__(self, step: int, value: float, history: History) -> bool:
        return step >= self.step

    def lookahead(self, metric: str, upcoming: Upcoming) -> Bools:
        """At which upcoming readings it opens."""
        return upcoming.columns[metric].steps >= self.step


NOT_FINITE = Outside(-sys.float_info.max, sys.float_info.max)
"""A gate that opens when the value is not finite."""
NEVER = Since(math.nan)
"""A gate that stays closed."""

MakeGate = Callable[[Any, RunInfo], Gate]
"""Makes the gate of a run from the rule's settings."""
MakeLookahead = Callable[[Any, RunInfo], Lookahead]
"""Makes the lookahead of a run from the rule's settings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One thing that can be wrong, and how it is seen."""

    code: str
    name: str
    family: Family
    reads: tuple[str, ...]
    """Metric names; any of them may have no readings. A single name with a `*` stands for several metrics. Each is
    judged separately, and the scope of a finding is written as `family/scope/quantity`."""
    when: tuple[str, ...]
    """The metrics whose new readings trigger the rule. Findings have their scopes, and only they can resolve them."""
    check: Check
    settings: type[Settings] | None = None
    """The thresholds; None if there is nothing to set."""
    gate: MakeGate | None = None
    """A quick test of the newest value. If it returns False, the check would find nothing and is skipped.

    It is not asked if several metrics in `when` have new readings."""
    lookahead: MakeLookahead | None = None
    """The same over many stored steps at once, so that a replay need not stop at each of them.

    `Outside` and `Since` look ahead by themselves; what is stated here then applies in addition."""
    per_scope: bool = False
    """True: the check takes a `Panel` per name and returns findings; False: a `Series` (scope "") per name."""
    hold: int = 1
    """Number of checks in a row with this finding before it fires."""
    keep: int = 50
    """Number of steps that the alert stays open after it was last seen."""
    messages: tuple[Message, ...] = ()
    """What it says. If there are several, the first one for which the evidence has all values is used."""
    remedies: tuple[Prescription, ...] = ()
    """Best first."""
    explains: tuple[str, ...] = ()
    """Codes of rules whose alerts are symptoms of this one."""

    def __call__(self, *readings: Any, **given: Any) -> Any:
        """What the check returns."""
        return self.check(*readings, **given)

    @property
    def is_about_a_pattern(self) -> bool:
        """Whether it judges every metric of a pattern such as `*_metric/*`."""
        return "*" in self.reads[0]

    @property
    def table(self) -> str:
        """The name of its settings in a config, under `thresholds`."""
        return self.name.replace("-", "_")

    @property
    def documentation(self) -> str:
        """The docstring, the only source of the rule's documentation."""
        return inspect.getdoc(self.check) or ""

    @property
    def summary(self) -> str:
        """What is wrong, in one sentence."""
        return self.documentation.partition("\n")[0]

    def judge(
        self, step: int, history: History, settings: Settings | None, info: RunInfo, new: Iterable[str] = ()
    ) -> list[Finding]:
        """The findings in the newest readings; for a rule about a pattern, in those of the `new` metrics."""
        return self.judging(settings, info)(step, history, new) or []

    def judging(self, settings: Settings | None, info: RunInfo) -> Judging:
        """The same as a function of step, history and `new` metrics; everything else is looked up beforehand."""
        code, check, reads, per_scope = self.code, self.check, self.reads, self.per_scope
        parameters = _parameters(check)
        available: dict[str, Any] = {"settings": settings, "info": info}
        named = {name: value for name, value in available.items() if name in parameters}
        wants_metric = "metric" in parameters

        check_of_run = partial(check, **named)

        def judge(step: int, history: History, new: Iterable[str]) -> list[Finding] | None:
            look: Callable[[str], Any] = history.panel if per_scope else history.series
            result = check_of_run(*map(look, reads))
            if result is None:
                return []
            if result is NOT_JUDGED:
                return None
            return [_placed(raw, code, step, raw.scope) for raw in _several(result)]

        def judge_pattern(step: int, history: History, new: Iterable[str]) -> list[Finding]:
            look: Callable[[str], Any] = history.panel if per_scope else history.series
            return [
                _placed(raw, code, step, spelled_out(metric, raw.scope))
                for metric in new
                for raw in _several(check(look(metric), **named, **({"metric": metric} if wants_metric else {})))
            ]

        return judge_pattern if self.is_about_a_pattern else judge

    def looking_ahead(self, settings: Settings | None, info: RunInfo) -> Lookahead | None:
        """Tells at which of many stored readings the check is needed; None if it is at all of them."""
        gate = self.gate(settings, info) if self.gate else None
        by_gate = gate.lookahead if isinstance(gate, Outside | Since) else None
        stated = self.lookahead(settings, info) if self.lookahead else None
        return both(by_gate, stated) if by_gate and stated else by_gate or stated


def _placed(raw: Finding, code: str, step: int, scope: str) -> Finding:
    """A check's finding with its rule, step and scope; `dataclasses.replace` takes three times as long."""
    return Finding(code, scope, step, raw.severity, raw.value, raw.bound, raw.evidence)


def _several(result: Finding | Iterable[Finding] | None) -> Iterable[Finding]:
    return () if result is None else [result] if isinstance(result, Finding) else result


@lru_cache(maxsize=256)
def _parameters(check: Check) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(check).parameters


def rule(
    code: str,
    name: str,
    *,
    reads: tuple[str, ...],
    message: str | Message | tuple[Message, ...],
    remedies: tuple[Prescription, ...],
    settings: type[Settings] | None = None,
    gate: MakeGate | None = None,
    lookahead: MakeLookahead | None = None,
    when: tuple[str, ...] = (),
    per_scope: bool = False,
    hold: int = 1,
    keep: int = 50,
    explains: tuple[str, ...] = (),
) -> Callable[[Check], Rule]:
    """Turn a check function into a rule. Raises ValueError if something is missing, and says what.

    Rules in `forewarn.judge.rules` are always active. Pass your own to `watch(rules=[...])`.

    The check takes one series (or panel) per metric it reads, then `settings` and `info` if it has such parameters. It
    is called when a metric in `when` has a new reading, by default the first metric it reads. For a pattern such as
    `*_metric/*`, it is called for each matching metric with a new reading. It gets the name of the metric if it has a
    parameter `metric`. With a `gate`, it is called only if the gate returns True. A gate that is `Outside` or
    `Since`, or a `lookahead`, speeds up the replay of long runs.

    A check that finds nothing returns None, and its alert is over after `keep` steps. If it cannot tell, as in noise or
    during a warm-up, it returns `forewarn.judge.registry.NOT_JUDGED`, and an alert that is open stays so.

    If `message` is only a headline, the numbers are added: value, limit and usual level.
    """

    def declare(check: Check) -> Rule:
        if not re.fullmatch(r"[A-Z]\d{3}", code) or code[0] not in BY_LETTER:
            families = ", ".join(f"{family.letter} {family.title}" for family in Family)
            raise ValueError(
                f"the code {code!r} of {name} must be the letter of a family ({families}) and three digits"
            )
        declared = Rule(
            code=code, name=name, family=BY_LETTER[code[0]], reads=reads, when=when or reads[:1], check=check,
            settings=settings, gate=gate, lookahead=lookahead, per_scope=per_scope, hold=hold, keep=keep,
            messages=_messages(message, (when or reads)[0]), remedies=remedies, explains=explains,
        )  # fmt: skip
        for defect in _defects(declared):
            raise ValueError(f"the rule {code} {name} is incomplete: {defect}")
        return declared

    return declare


def _messages(message: str | Message | tuple[Message, ...], metric: str) -> tuple[Message, ...]:
    if isinstance(message, str):
        return (Message(message, f"{label(metric)} {{value}} · limit {{bound}} · usual {{level}}"),)
    return (message,) if isinstance(message, Message) else tuple(message)


def _defects(declared: Rule) -> Iterable[str]:
    """What is missing or wrong in a rule, each as the end of a sentence."""
    check, name = declared.check, declared.name
    if not re.fullmatch(r"[a-z]+(-[a-z]+)*", name):
        yield f"its name {name!r} must be lower-case words joined by hyphens"
    if check.__name__ != declared.table:
        yield f"its function must be called {declared.table}, not {check.__name__}"
    yield from _defects_of_metrics(declared)
    yield from _defects_of_documentation(declared)
    if not declared.remedies:
        yield "it has no remedies; `advise(...)` makes one"
    if not declared.messages or not all(message.headline for message in declared.messages):
        yield "it has no message that says what happened"
    for template in [template for message in declared.messages for template in message]:
        try:
            if not all(key.isidentifier() for _, key, _, _ in Formatter().parse(template) if key is not None):
                yield f"a key of its message {template!r} has no name"
        except ValueError as error:
            yield f"its message {template!r} cannot be filled in: {error}"
    yield from _defects_of_settings(declared)


def _defects_of_metrics(declared: Rule) -> Iterable[str]:
    if not declared.reads or not all(is_metric_name(metric.replace("*", "any")) for metric in declared.reads):
        yield f"reads={declared.reads!r} must be names of metrics, such as train/loss"
    elif missing := unknown(declared.reads):
        yield f"it reads {', '.join(missing)}, which nothing records: see docs/metrics.md"
    elif not set(declared.when) <= set(declared.reads):
        yield f"when={declared.when!r} must be among what it reads"
    elif declared.is_about_a_pattern and not (declared.per_scope and declared.reads == declared.when[:1]):
        yield "a rule about a pattern of metrics reads that pattern alone, with per_scope=True"
    arguments = [name for name in _parameters(declared.check) if name not in _GIVEN_BY_NAME]
    if len(arguments) != len(declared.reads):
        yield f"it reads {len(declared.reads)} metrics, but its function takes {len(arguments)}: {', '.join(arguments)}"
    if declared.hold < 1 or declared.keep < 1:
        yield "hold and keep must be 1 or more"


def _defects_of_documentation(declared: Rule) -> Iterable[str]:
    lines = declared.documentation.splitlines()
    if not lines or not re.fullmatch(r"[A-Z][^.]*\.", lines[0]) or (len(lines) > 1 and lines[1]):
        yield "its docstring must begin with one sentence that says what is wrong, and an empty line"
    elif [line for line in lines if line.startswith("#")] != _SECTIONS:
        yield f"its docstring must have the sections {' and '.join(_SECTIONS)}"
    else:
        try:
            shown = {parse(line, declared.reads[0]).fires for line in example_lines(declared.documentation)}
        except ValueError as error:
            yield f"an example cannot be read: {error}"
            return
        if missing := {True, False} - shown:
            yield f"its docstring has no example that {'fires' if True in missing else 'stays quiet'}"


def _defects_of_settings(declared: Rule) -> Iterable[str]:
    parameter = _parameters(declared.check).get("settings")
    if declared.settings is None:
        if parameter is not None:
            yield "its function takes settings, but the declaration has no settings=..."
    elif parameter is None:
        yield f"it declares settings={declared.settings.__name__}, but its function takes no settings"
    elif (kind := getattr(parameter.annotation, "__name__", parameter.annotation)) != declared.settings.__name__:
        yield f"its function takes settings: {kind}, not {declared.settings.__name__}"


def finding(severity: Severity, value: float, bound: float, scope: str = "", **evidence: float | str) -> Finding:
    """A finding as a check returns it; `Rule.judge` fills in the code and the step."""
    plain = {name: item if isinstance(item, str) else float(item) for name, item in evidence.items()}
    return Finding("", scope, -1, severity, float(value), float(bound), plain)


NOT_JUDGED = finding(Severity.INFO, math.nan, math.nan)
"""What a check returns that cannot tell: neither a finding, nor the end of one."""


def check_distinct(rules: Iterable[Rule]) -> None:
    """Raise ValueError if two of these rules share a code, a name or a class of settings."""
    codes: dict[str, Rule] = {}
    names: dict[str, Rule] = {}
    kinds: dict[type[Settings], Rule] = {}
    for declared in rules:
        owners = codes.setdefault(declared.code, declared), names.setdefault(declared.name, declared)
        if any(owner is not declared for owner in owners):
            raise ValueError(
                f"the rule {declared.code} {declared.name} is declared twice; a code and a name are never reused"
            )
        if declared.settings is not None and (owner := kinds.setdefault(declared.settings, declared)) is not declared:
            raise ValueError(
                f"the settings {declared.settings.__name__} of {declared.code} {declared.name} already belong to "
                f"{owner.name}; derive a separate class"
            )
