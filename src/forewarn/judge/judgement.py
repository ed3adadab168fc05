"""Judging a step: the rules, their settings, and what they found."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import TypeVar

import numpy as np

from forewarn.judge.derived import derivations
from forewarn.judge.history import History
from forewarn.judge.registry import NO_BOUND, Gate, Judging, Rule
from forewarn.judge.rules import all_rules
from forewarn.metrics import catalogue_of
from forewarn.rows import Row, RowLayout
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


@dataclass(frozen=True, slots=True)
class Judgement:
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
            for block in self.blocks
            if block.name in names
            for index in np.flatnonzero(np.isfinite(block.values))
        }


_DueRule = tuple[str, tuple[str, ...], Judging, Gate | None, int]
"""A code, its new metrics, the function that judges them, the gate, and the index of the block it tests."""


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
        self._quiet = lru_cache(_PATTERNS)(self._quiet_for)
        self._concerned: dict[str, list[str]] = {}
        """By metric: the codes of the rules that judge its new readings."""

    def __call__(self, step: int, history: History, blocks: Iterable[Block]) -> Judgement:
        """Judge the step whose blocks were just added to the history."""
        if type(blocks) is Row and not self.failed and (quiet := self._judge_quiet(step, history, blocks)) is not None:
            return quiet
        blocks = tuple(blocks)
        due, judgings = self._due(tuple([block.name for block in blocks]))
        findings: list[Finding] = []
        left_out: set[str] = set()
        for code, names, judging, gate, place in judgings:
            if code in self.failed:
                continue
            try:
                if gate is not None and not gate(step, _of_the_whole(blocks[place]), history):
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

    def _judge_quiet(self, step: int, history: History, row: Row) -> Judgement | None:
        """The judgement of a row on which every gate is closed, as on most steps; None of any other."""
        due, gates = self._quiet(row.layout)
        if gates is None:
            return None
        numbers = row.numbers
        try:
            for gate, place in gates:
                if gate(step, math.nan if place is None else numbers[place], history):
                    return None
        except Exception:  # it is asked again, and reported
            return None
        return Judgement(step, row, due, (), self._patterns)

    def _quiet_for(
        self, layout: RowLayout
    ) -> tuple[Mapping[str, Collection[str]], list[tuple[Gate, int | None]] | None]:
        """What is due for rows of this layout, and the gates with the positions of their numbers.

        None instead of gates if a rule has none.
        """
        due, judgings = self._due(layout.names)
        gates = [(gate, layout.whole.get(names[0])) for _, names, _, gate, _ in judgings if gate is not None]
        return due, gates if len(gates) == len(judgings) else None

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


def _of_the_whole(block: Block) -> float:
    """The value of a metric of the run as a whole; NaN of any other."""
    return block.values.item() if block.scopes == _WHOLE else math.nan


def _read_now(findings: Iterable[Finding], blocks: Iterable[Block], names: Collection[str]) -> list[Finding]:
    """The findings about scopes that were just read: the check of a pattern cannot tell a missing value from NaN."""
    scopes = {spelled_out(block.name, scope) for block in blocks if block.name in names for scope in block.scopes}
    return [finding for finding in findings if finding.scope in scopes]
