"""Runs made of plain numbers, judged as a monitor judges them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from forewarn.config import Config
from forewarn.judge.examples import Example
from forewarn.judge.judgement import Judge
from forewarn.judge.ledger import Ledger
from forewarn.judge.rules import all_rules, find_rule
from forewarn.measure.schedule import Escalation, Schedule
from forewarn.types import Alert, AlertState, Block, ParameterInfo, RunInfo, Severity

Reading = float | Mapping[str, float]
"""A value of the run as a whole, or one for each scope."""


def block(step: int, name: str, reading: Reading) -> Block:
    scoped = reading if isinstance(reading, Mapping) else {"": reading}
    return Block(step, float(step), name, tuple(scoped), np.array(list(scoped.values()), np.float32))


def info(*matrices: str, vectors: Sequence[str] = (), groups: Sequence[Mapping[str, float]] = ()) -> RunInfo:
    """Linear layers of 8 × 8 and biases of 8."""
    known = {name: ParameterInfo((8, 8), "Linear.weight", "float32", 0, True) for name in matrices}
    known |= {name: ParameterInfo((8,), "Linear.bias", "float32", 0, True) for name in vectors}
    return RunInfo(parameters=known, groups=tuple(groups))


class Run:
    """A history, its judge and its ledger, fed step by step."""

    def __init__(self, *codes: str, info: RunInfo | None = None, config: Config | None = None) -> None:
        self.config = config or Config()
        self.info = info or RunInfo()
        rules = tuple(map(find_rule, codes)) or all_rules()
        rule_set = replace(self.config.rule_set(), rules=rules)
        self.history = rule_set.history(self.info)
        self.judge = Judge(rule_set, self.info)
        self.ledger = Ledger(rules)
        self.schedule = Escalation(Schedule(), self.config.escalation_steps)
        self.at = 0

    def feed(self, readings: Mapping[str, Reading] | Sequence[Block], step: int | None = None) -> tuple[Alert, ...]:
        """One step; returns the alerts that changed."""
        self.at = self.at if step is None else step
        if isinstance(readings, Mapping):
            readings = [block(self.at, name, reading) for name, reading in readings.items()]
        readings = self.history.append(readings)
        changed = self.ledger.update(self.judge(self.at, self.history, readings), self.history, self.info)
        assert not self.judge.failed
        if any(alert.severity >= Severity.WARNING and alert.state is AlertState.FIRING for alert in changed):
            self.schedule.escalate(self.at)
        self.at += 1
        return changed

    def series(self, name: str, values: Iterable[float]) -> Run:
        """One reading of the run as a whole per step."""
        for value in values:
            self.feed({name: value})
        return self

    @property
    def codes(self) -> set[str]:
        """Of the alerts that ever fired."""
        return {alert.code for alert in self.ledger.alerts}

    def loud(self) -> list[tuple[str, str, int]]:
        """Code, scope and first step of every warning."""
        return [(each.code, each.scope, each.since) for each in self.ledger.alerts if each.severity > Severity.INFO]


def fired(example: Example, code: str) -> bool:
    """Whether the rule fires anywhere in an example."""
    run = Run(code, info=example.info)
    for step, blocks in example.steps():
        run.feed(blocks, step)
    return bool(run.ledger.alerts)
