"""Judging a step: the rules, their settings, and what they found."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import NamedTuple, TypeVar

import numpy as np

from forewarn.judge.derived import derivations
from forewarn.judge.history import History
from forewarn.judge.registry import NO_BOUND, Gate, Judging, Outside, Rule, Since
from forewarn.judge.rules import all_rules
from forewarn.metrics import catalogue_of
from forewarn.rows import Row, RowLayout, Sheet, blocks_of
from forewarn.settings import Settings
from forewarn.types import Block, Finding, RuleInfo, RunInfo, Severity, spelled_out

_log = logging.getLogger("forewarn")

RULE_FAILED = "X102"

_PATTERNS = 64
"""Number of cached combinations of metrics; the steps of a run differ in few ways."""

_WHOLE = ("",)

S = TypeVar("S", bound=Settings)


@dataclass(frozen=True, slots=True)
class RuleSet:
    """The rules and settings that judge a run; `Config.rule_set()` makes one."""

    rules: tuple[Rule, ...]
    settings: Mapping[str, Settings]
    """By rule code, including disabled rules, whose bounds some views show."""
    history_window: int = 1024
    detail_window: int = 64
    disabled: tuple[Rule, ...] = ()
    """Rules that are loaded but switched off."""

    @classmethod
    def of(cls, rules: Iterable[Rule]) -> RuleSet:
        """These rules with their default settings."""
        rules = tuple(rules)
        return cls(rules, {rule.code: rule.settings() for rule in (*all_rules(), *rules) if rule.settings})

    def history(self, info: RunInfo | None = None) -> History:
        """A history of this run, long enough for these rules."""
        judged = {name for rule in self.rules for name in (rule.when if rule.is_about_a_pattern else rule.reads)}
        return History(
            self.history_window, self.detail_window, judged, derivations(self), catalogue_of(info or RunInfo())
        )

    def not_loaded(self, info: RunInfo) -> tuple[RuleInfo, ...]:
        """The rules that judged this run live but are not loaded here."""
        loaded = {(rule.code, rule.name) for rule in (*self.rules, *self.disabled)}
        return tuple(rule for rule in info.rules if (rule.code, rule.name) not in loaded)

    def settings_of(self, kind: type[S]) -> S:
        """The settings of this class, which belongs to one rule."""
        return next(settings for settings in self.settings.values() if isinstance(settings, kind))


class Judgement(NamedTuple):
    """What the rules said about one step."""

    step: int
    blocks: Sequence[Block]
    """The new readings."""
    judged: Mapping[str, Collection[str]]
    """By rule code: the metrics with new readings. Only rules that have some are listed."""
    findings: tuple[Finding, ...]
    patterns: Collection[str] = ()
    """The codes of rules about patterns of metrics; the scopes of their findings include the metric."""

    def covered(self, code: str) -> set[str]:
        """The scopes that this rule judged, whether or not it found something. Non-finite readings do not count."""
        names = self.judged.get(code, ())
        return {
            spelled_out(block.name, block.scopes[index]) if code in self.patterns else block.scopes[index]
            for block in blocks_of(self.blocks, names)
            for index in np.flatnonzero(np.isfinite(block.values))
        }


_DueRule = tuple[str, tuple[str, ...], Judging, Gate | None, int]
"""A code, its new metrics, the function that judges them, the gate, and the index of the block it tests."""


class _Gates:
    """What is due on steps that read the same, and its gates; those that only compare are asked all at once."""

    def __init__(self, layout: RowLayout, due: Mapping[str, Collection[str]], judgings: Sequence[_DueRule]) -> None:
        self.due, self.judgings = due, judgings
        self._are_all = all(gate is not None for *_, gate, _ in judgings)
        self._since = math.inf
        bounds: dict[int, tuple[float, float]] = {}
        self._others: list[tuple[Gate, int | None]] = []
        for _, names, _, gate, _ in judgings:
            place = layout.whole.get(names[0])
            if isinstance(gate, Since):
                self._since = gate.step if gate.step < self._since else self._since
            elif isinstance(gate, Outside) and place is not None:
                low, high = bounds.get(place, (-math.inf, math.inf))
                bounds[place] = max(low, gate.low), min(high, gate.high)
            elif gate is not None:
                self._others.append((gate, place))
        self._bounds = [(place, *both) for place, both in bounds.items()]

    def are_closed(self, step: int, numbers: Sequence[float], history: History) -> bool:
        """Whether every due rule has a gate and none is open, as on most steps."""
        if not self._are_all or step >= self._since:
            return False
        for place, low, high in self._bounds:
            if not low <= numbers[place] <= high:
                return False
        try:
            for gate, position in self._others:
                if gate(step, math.nan if position is None else numbers[position], history):
                    return False
        except Exception:  # it is asked again, and reported
            return False
        return True


class Judge:
    """Applies rules to a history. A rule that raises is switched off and becomes a finding itself."""

    def __init__(self, rule_set: RuleSet, info: RunInfo) -> None:
        self.rule_set = rule_set
        self.info = info
        self.failed: set[str] = set()
        """Codes of rules that raised."""
        rules = rule_set.rules
        self._patterns = frozenset(rule.code for rule in rules if rule.is_about_a_pattern)
        self._names = {rule.code: rule.name for rule in rules}
        self._judging = {rule.code: rule.judging(rule_set.settings.get(rule.code), info) for rule in rules}
        self._gates = {rule.code: rule.gate(rule_set.settings.get(rule.code), info) for rule in rules if rule.gate}
        self._due = lru_cache(_PATTERNS)(self._due_for)
        self._gates_of = lru_cache(_PATTERNS)(self._gates_for)
        self._concerned: dict[str, list[str]] = {}
        """By metric: the codes of the rules that judge its new readings."""

    def __call__(self, step: int, history: History, blocks: Iterable[Block]) -> Judgement:
        """Judge the step whose blocks were just added to the history."""
        if isinstance(blocks, Row):
            gates = self._gates_of(blocks.layout)
            if not self.failed and gates.are_closed(step, blocks.numbers, history):
                return Judgement(step, blocks, gates.due, (), self._patterns)
            due, judgings = gates.due, gates.judgings
        elif isinstance(blocks, Sheet):
            gates = self._gates_of(blocks.layout)
            due, judgings = gates.due, gates.judgings
        else:
            blocks = tuple(blocks)
            due, judgings = self._due(tuple([block.name for block in blocks]))
        findings: list[Finding] = []
        left_out: set[str] = set()
        for code, names, judging, gate, place in judgings:
            if code in self.failed:
                continue
            try:
                if gate is not None and not gate(step, _of_the_whole(blocks, place), history):
                    continue
                new = judging(step, history, names)
                if new is None:
                    left_out.add(code)
                elif new:
                    findings += _read_now(new, blocks, names) if code in self._patterns else new
            except Exception:
                name = self._names[code]
                _log.exception("the rule %s %s failed and is switched off", code, name)
                self.failed.add(code)
                findings.append(Finding(RULE_FAILED, name, step, Severity.WARNING, 1.0, NO_BOUND))
        left_out |= self.failed
        judged = {code: names for code, names in due.items() if code not in left_out} if left_out else due
        return Judgement(step, blocks, judged, tuple(findings), self._patterns)

    def _gates_for(self, layout: RowLayout) -> _Gates:
        return _Gates(layout, *self._due(layout.names))

    def _due_for(self, metrics: tuple[str, ...]) -> tuple[dict[str, tuple[str, ...]], list[_DueRule]]:
        """The codes of the rules that new readings of these metrics are for, and which of them each is to judge.

        Then the same with what judges them; a gate looks at the last block of the metric.
        """
        due: dict[str, tuple[str, ...]] = {}
        for metric in dict.fromkeys(metrics):
            for code in self._rules_of(metric):
                due[code] = (*due.get(code, ()), metric)
        last = {metric: place for place, metric in enumerate(metrics)}
        return due, [
            (code, names, self._judging[code], self._gates.get(code) if len(names) == 1 else None, last[names[0]])
            for code, names in due.items()
        ]

    def _rules_of(self, metric: str) -> list[str]:
        codes = self._concerned.get(metric)
        if codes is None:
            rules = self.rule_set.rules
            codes = [rule.code for rule in rules if any(fnmatchcase(metric, name) for name in rule.when)]
            self._concerned[metric] = codes
        return codes


def _of_the_whole(blocks: Sequence[Block], place: int) -> float:
    """The value of the metric at this place if it is of the run as a whole; NaN of any other."""
    if isinstance(blocks, Row):
        layout = blocks.layout
        return blocks.numbers[layout.starts[place]] if layout.scopes[place] == _WHOLE else math.nan
    block = blocks[place]
    return block.values.item() if block.scopes == _WHOLE else math.nan


def _read_now(findings: Iterable[Finding], blocks: Iterable[Block], names: Collection[str]) -> list[Finding]:
    """The findings about scopes that were just read: the check of a pattern cannot tell a missing value from NaN."""
    scopes = {spelled_out(block.name, scope) for block in blocks if block.name in names for scope in block.scopes}
    return [finding for finding in findings if finding.scope in scopes]
