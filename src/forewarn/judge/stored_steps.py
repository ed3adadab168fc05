"""Judges stored steps many at a time: only those on which a rule may find something are judged one by one."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import NamedTuple

import numpy as np

from forewarn.judge.history import History
from forewarn.judge.judgement import Judge, RuleSet
from forewarn.judge.ledger import Ledger
from forewarn.judge.series import Bools
from forewarn.judge.upcoming import Column, Lookahead, Upcoming
from forewarn.store import Run
from forewarn.store.replay import Stretch
from forewarn.types import RunInfo, spelled_out

_log = logging.getLogger("forewarn")

_MOST_STEPS = 512
"""Number of steps looked at together: enough for arrays to pay, few enough that a spike concerns few others."""

_LEAST_STEPS = 8
"""The same at the start of a run, where levels are not known yet."""


def judged_steps(run: Run, rule_set: RuleSet) -> Ledger:
    """The ledger after all steps of a run, the same as if each had been judged by itself."""
    stored = _StoredSteps(rule_set, run.info)
    most = min(_MOST_STEPS, rule_set.history_window)  # levels must not miss any
    for stretch in run.stretches():
        first = 0
        while first < len(stretch):
            end = min(first + min(max(stored.num_steps, _LEAST_STEPS), most), len(stretch))
            stored.judge(stretch, first, end)
            first = end
    return stored.ledger


class _Plan(NamedTuple):
    """How rows of one pattern are judged."""

    alone: bool
    """Whether each must be judged by itself."""
    metrics: tuple[str, ...]


class _StoredSteps:
    """A history, judge and ledger to which stored steps are added."""

    def __init__(self, rule_set: RuleSet, info: RunInfo) -> None:
        self.ledger = Ledger(rule_set.rules)
        self._info = info
        self._history = rule_set.history(info)
        self._judge = Judge(rule_set, info)
        self._rules = {rule.code: rule for rule in rule_set.rules}
        self._lookaheads: dict[str, Lookahead] = {
            rule.code: looking_ahead
            for rule in rule_set.rules
            if (looking_ahead := rule.looking_ahead(rule_set.settings.get(rule.code), info))
        }
        self.num_steps = 0
        """Number of steps judged so far."""
        self._codes: dict[str, tuple[str, ...]] = {}
        """By metric: the codes of the rules that its new readings are for."""
        self._plans: dict[int, _Plan] = {}
        """By the number of a pattern."""

    def judge(self, stretch: Stretch, first: int, end: int) -> None:
        """Add these rows of a stretch."""
        numbers = stretch.patterns[first:end]
        plans = {number: self._plan(stretch, number) for number in np.unique(numbers).tolist()}
        alone = np.isin(numbers, [number for number, plan in plans.items() if plan.alone])
        columns: dict[str, Column] = {}
        for metric in {metric: None for plan in plans.values() if not plan.alone for metric in plan.metrics}:
            readings = stretch.column(metric, first, end)
            if readings is None:  # its scopes change
                alone |= np.isin(numbers, [number for number, plan in plans.items() if metric in plan.metrics])
            else:
                scopes, rows, values = readings
                columns[metric] = Column(scopes, rows - first, stretch.steps[rows], values)
        upcoming = Upcoming(self._history, (name for plan in plans.values() for name in plan.metrics), columns)
        for metric, column in columns.items():
            for code in self._rules_of(metric):
                if not alone[column.rows].all():
                    alone[column.rows[self._may_be_found(code, metric, upcoming)]] = True
        quiet = _Quiet({metric: column for metric, column in columns.items() if not alone[column.rows].all()})
        place = 0
        for event in [*np.flatnonzero(alone).tolist(), end - first]:
            while place <= event:
                change = self._next_change(quiet, place, event)
                quiet.join(self._history, place, change)
                if change < end - first:
                    step, blocks = stretch.row(first + change)
                    judgement = self._judge(step, self._history, self._history.append(blocks))
                    self.ledger.update(judgement, self._history, self._info)
                place = change + 1
        upcoming.settle()
        self.num_steps += end - first

    def _plan(self, stretch: Stretch, number: int) -> _Plan:
        plan = self._plans.get(number)
        if plan is None:
            names = tuple(name for name, _ in stretch.layouts(number))
            codes = [code for metric in names for code in self._rules_of(metric)]
            # A rule that several new readings are for is always called.
            is_clear = len(set(names)) == len(names) and len(set(codes)) == len(codes)
            alone = not is_clear or not self._lookaheads.keys() >= set(codes) or self._history.derives(names)
            plan = self._plans[number] = _Plan(alone, names)
        return plan

    def _rules_of(self, metric: str) -> tuple[str, ...]:
        if metric not in self._codes:
            self._codes[metric] = tuple(
                code for code, rule in self._rules.items() if any(fnmatchcase(metric, name) for name in rule.when)
            )
        return self._codes[metric]

    def _may_be_found(self, code: str, metric: str, upcoming: Upcoming) -> Bools:
        num_readings = len(upcoming.columns[metric].rows)
        if code in self._judge.failed:
            return np.zeros(num_readings, np.bool_)
        try:
            possible = self._lookaheads[code](metric, upcoming)
        except Exception:
            _log.debug("%s could not look ahead at %s", code, metric, exc_info=True)
            possible = None
        return np.ones(num_readings, np.bool_) if possible is None else possible

    def _next_change(self, quiet: _Quiet, place: int, end: int) -> int:
        """The first of these rows at which an open alert changes although nothing is found; `end` if there is none."""
        for (code, scope), since in self.ledger.changes_when_quiet():
            rule = self._rules[code]
            for metric, column in quiet.columns.items():
                if code not in self._rules_of(metric):
                    continue
                scopes = column.scopes
                if rule.is_about_a_pattern:
                    scopes = tuple(spelled_out(metric, name) for name in scopes)
                if scope in scopes:
                    part = quiet.between(metric, place, end)
                    judged = np.isfinite(column.values[part, scopes.index(scope)]) & (column.steps[part] >= since)
                    if judged.any():
                        end = int(column.rows[part][judged.argmax()])
        return end


class _Quiet:
    """The metrics of rows that need not be judged one by one."""

    def __init__(self, columns: Mapping[str, Column]) -> None:
        self.columns = columns
        self._rows: dict[str, list[int]] = {metric: column.rows.tolist() for metric, column in columns.items()}

    def between(self, metric: str, first: int, end: int) -> slice:
        """Where the readings of these rows are in the column of a metric."""
        rows = self._rows[metric]
        start = bisect_left(rows, first)
        return slice(start, bisect_left(rows, end, start))

    def join(self, history: History, first: int, end: int) -> None:
        """Add these rows to the history."""
        if first == end:
            return
        for metric, column in self.columns.items():
            part = self.between(metric, first, end)
            if part.start < part.stop:
                history.extend(metric, column.scopes, column.steps[part], column.values[part])
