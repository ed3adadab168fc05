"""What a rule is, how it is declared, and how all of them are judged."""

from __future__ import annotations

import difflib
import inspect
import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any

import numpy as np

from forewarn.config import Config
from forewarn.judge.history import History
from forewarn.judge.remedies import Prescription
from forewarn.metrics import unknown
from forewarn.settings import Settings
from forewarn.types import Block, Finding, RunInfo, Severity, spelled_out

_log = logging.getLogger("forewarn")

RULE_FAILED = "X102"

NO_BOUND = math.nan
"""The bound of a finding that compares nothing: its value is a flag or a code, and no view shows the two."""

_PATTERNS = 64
"""Combinations of metrics whose rules are remembered: the steps of a run differ in few ways."""

Check = Callable[..., Finding | Iterable[Finding] | None]
Judging = Callable[[int, History, Iterable[str]], list[Finding]]


@dataclass(frozen=True, slots=True)
class Rule:
    """One thing that can be wrong, and how it is seen."""

    code: str
    name: str
    reads: tuple[str, ...]
    """Metric names; any of them may be empty. One with a `*` in it, alone, is a family: each metric of it is judged by
    itself, and the scope of a finding is spelled out as `family/scope/quantity`."""
    when: tuple[str, ...]
    """Those whose new readings the rule judges. A finding has a scope of theirs, and only theirs can take it back."""
    check: Check
    per_scope: bool
    """True: the check takes a `Panel` per name and returns findings; False: a `Series` (scope "") per name."""
    hold: int
    """Checks in a row that a finding must persist for before it fires."""
    keep: int
    """Steps that the alert stays open for after it was last seen."""
    remedies: tuple[Prescription, ...]
    """Best first."""
    explains: tuple[str, ...]
    """Codes of rules whose alerts are symptoms of this one."""
    wants_config: bool
    wants_info: bool
    wants_metric: bool = False
    """Whether the check of a family takes the name of the metric."""

    @property
    def is_family(self) -> bool:
        return "*" in self.reads[0]

    @property
    def documentation(self) -> str:
        """The docstring, the only source of what is said about the rule."""
        return inspect.getdoc(self.check) or ""

    @property
    def summary(self) -> str:
        """What is wrong, in one sentence."""
        return self.documentation.partition("\n")[0]

    def judge(
        self, step: int, history: History, config: Config, info: RunInfo, new: Iterable[str] = ()
    ) -> list[Finding]:
        """What this rule finds in the newest readings; if it is about a family, in those of the `new` ones of it."""
        return self.judging(config, info)(step, history, new)

    def judging(self, config: Config, info: RunInfo) -> Judging:
        """The same as a function of the step, the history and the `new` metrics, all else looked up beforehand."""
        check, reads, per_scope = self.check, self.reads, self.per_scope
        named: dict[str, Any] = {}
        if self.wants_config:
            named["config"] = self.settings(config)
        if self.wants_info:
            named["info"] = info

        def judge(step: int, history: History, new: Iterable[str]) -> list[Finding]:
            look: Callable[[str], Any] = history.panel if per_scope else history.series
            found = check(*map(look, reads), **named)
            return [] if found is None else [replace(one, code=self.code, step=step) for one in _several(found)]

        def judge_family(step: int, history: History, new: Iterable[str]) -> list[Finding]:
            look: Callable[[str], Any] = history.panel if per_scope else history.series
            return [
                replace(one, code=self.code, step=step, scope=spelled_out(metric, one.scope))
                for metric in new
                for one in _several(check(look(metric), **named, **({"metric": metric} if self.wants_metric else {})))
            ]

        return judge_family if self.is_family else judge

    def settings(self, config: Config) -> Settings:
        """The thresholds of this rule."""
        settings: Settings = getattr(config.thresholds, self.name.replace("-", "_"))
        return settings


def _several(found: Finding | Iterable[Finding] | None) -> Iterable[Finding]:
    return () if found is None else [found] if isinstance(found, Finding) else found


_RULES: dict[str, Rule] = {}


def rule(
    code: str,
    name: str,
    *,
    reads: tuple[str, ...],
    remedies: tuple[Prescription, ...],
    when: tuple[str, ...] = (),
    per_scope: bool = False,
    hold: int = 1,
    keep: int = 50,
    explains: tuple[str, ...] = (),
) -> Callable[[Check], Check]:
    """Declare a rule.

    The check takes one series (or panel) per name it reads, then `config` and `info` if it names them. It is called
    when a metric in `when` has a new reading; by default that is the first that it reads. Of a family such as
    `*_metric/*` it is called for each metric that has, and takes its name if it has a parameter `metric`.
    """

    def declare(check: Check) -> Check:
        taken = {known.name for known in _RULES.values()}
        if code in _RULES or name in taken:
            raise ValueError(f"the rule {code} {name} is declared twice; a code and a name are never reused")
        if missing := unknown(reads):
            raise ValueError(
                f"the rule {code} {name} reads {', '.join(missing)}, which nobody records: see docs/metrics.md"
            )
        parameters = inspect.signature(check).parameters
        _RULES[code] = Rule(
            code, name, reads, when or reads[:1], check, per_scope, hold, keep, remedies, explains,
            wants_config="config" in parameters, wants_info="info" in parameters, wants_metric="metric" in parameters,
        )  # fmt: skip
        return check

    return declare


def found(severity: Severity, value: float, bound: float, scope: str = "", **evidence: float | str) -> Finding:
    """A finding as a check returns it; the rule's code and the step are filled in by `Rule.judge`."""
    plain = {name: one if isinstance(one, str) else float(one) for name, one in evidence.items()}
    return Finding("", scope, -1, severity, float(value), float(bound), plain)


def all_rules() -> tuple[Rule, ...]:
    """Every rule, by code."""
    return tuple(_RULES[code] for code in sorted(_RULES))


def find_rule(code_or_name: str) -> Rule:
    """The rule with this code or name."""
    wanted = code_or_name.strip()
    for each in _RULES.values():
        if wanted.upper() == each.code or wanted.lower() == each.name:
            return each
    names = [each.name for each in _RULES.values()] + list(_RULES)
    close = difflib.get_close_matches(wanted, names, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(close)}?" if close else "`forewarn rules` lists them all"
    raise ValueError(f"there is no rule {code_or_name!r}; {hint}")


def judged_metrics(rules: Iterable[Rule]) -> set[str]:
    """What these rules look at, families by their patterns."""
    return {name for each in rules for name in each.reads}


def enabled_rules(config: Config) -> tuple[Rule, ...]:
    """The rules that this config leaves on; an unknown one in `disable` is a ValueError."""
    off = {find_rule(name).code for name in config.disable}
    return tuple(each for each in all_rules() if each.code not in off)


@dataclass(frozen=True, slots=True)
class Judgement:
    """What the rules said about one step."""

    step: int
    blocks: Sequence[Block]
    """The new readings."""
    judged: Mapping[str, Collection[str]]
    """For the code of each rule that had something new to look at: the metrics that it was."""
    findings: tuple[Finding, ...]
    families: Collection[str] = ()
    """The codes of rules about families of metrics, in whose findings the scopes are spelled out."""

    def covered(self, code: str) -> set[str]:
        """The scopes about which this rule has spoken, by a finding or by silence; what is not finite says nothing."""
        names = self.judged.get(code, ())
        return {
            spelled_out(block.name, block.scopes[at]) if code in self.families else block.scopes[at]
            for block in self.blocks
            if block.name in names
            for at in np.flatnonzero(np.isfinite(block.values))
        }


class Judge:
    """Applies rules to a history. A rule that raises is switched off and becomes a finding itself."""

    def __init__(self, rules: Sequence[Rule], config: Config, info: RunInfo) -> None:
        self.rules = tuple(rules)
        self.config = config
        self.info = info
        self.failed: set[str] = set()
        """Codes of rules that raised."""
        self._families = frozenset(each.code for each in self.rules if each.is_family)
        self._names = {each.code: each.name for each in self.rules}
        self._judging = {each.code: each.judging(config, info) for each in self.rules}
        self._due = lru_cache(_PATTERNS)(self._due_for)
        self._concerned: dict[str, list[str]] = {}
        """By metric: the codes of the rules that new readings of it are for."""

    def __call__(self, step: int, history: History, blocks: Iterable[Block]) -> Judgement:
        """Judge the step whose blocks have just joined the history."""
        blocks = tuple(blocks)
        due = self._due(tuple([block.name for block in blocks]))
        findings: list[Finding] = []
        for code, names in due.items():
            if code in self.failed:
                continue
            try:
                found = self._judging[code](step, history, names)
                if found:
                    findings += _read_now(found, blocks, names) if code in self._families else found
            except Exception:
                name = self._names[code]
                _log.exception("the rule %s %s failed and is switched off", code, name)
                self.failed.add(code)
                findings.append(Finding(RULE_FAILED, name, step, Severity.WARNING, 1.0, NO_BOUND))
        judged = {code: names for code, names in due.items() if code not in self.failed} if self.failed else due
        return Judgement(step, blocks, judged, tuple(findings), self._families)

    def _due_for(self, metrics: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
        """The codes of the rules that new readings of these metrics are for, and which of them each is to judge."""
        due: dict[str, tuple[str, ...]] = {}
        for metric in dict.fromkeys(metrics):
            for code in self._rules_of(metric):
                due[code] = (*due.get(code, ()), metric)
        return due

    def _rules_of(self, metric: str) -> list[str]:
        known = self._concerned.get(metric)
        if known is None:
            known = [each.code for each in self.rules if any(fnmatchcase(metric, name) for name in each.when)]
            self._concerned[metric] = known
        return known


def _read_now(findings: Iterable[Finding], blocks: Iterable[Block], names: Collection[str]) -> list[Finding]:
    """Those about scopes that were read: to the check of a family what is missing looks like what is not finite."""
    read = {spelled_out(block.name, scope) for block in blocks if block.name in names for scope in block.scopes}
    return [one for one in findings if one.scope in read]
