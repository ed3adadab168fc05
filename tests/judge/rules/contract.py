"""What holds for every rule, each clause as a function that raises an AssertionError where it does not."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import math
import re
import sys
from collections.abc import Collection, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np

import forewarn
from forewarn.judge.derived import derivations
from forewarn.judge.examples import Example, examples
from forewarn.judge.headlines import SEPARATOR, Message, Telling, tell
from forewarn.judge.history import History
from forewarn.judge.judgement import Judge, RuleSet
from forewarn.judge.ledger import prescribe
from forewarn.judge.registry import Rule
from forewarn.metrics import BUILT_IN
from forewarn.settings import Settings
from forewarn.types import Block, Finding, RunInfo, spelled_out
from tests.judge.rules.runs import Run, info

SOURCE = Path(forewarn.__file__).parent
SCOPES = ("a.weight", "b.weight", "c.weight", "a.bias")
FACTS = info("a.weight", "b.weight", "c.weight", vectors=["a.bias"], groups=[{"lr": 1e-3, "weight_decay": 0.1}])
WAITS = ("window", "steps", "checks", "minimum", "readings", "levels", "patience")
"""Words in the name of a setting that is a length of time."""
SMALL = frozenset({0, 1, 2, 3, 4})
"""Numbers that need no name: places, halves, quarters and squares."""
SAID_ONCE = {"X101"}
"""Rules whose finding stays true without a further reading: a probe that failed does not come back."""
JUDGED_OVER_A_COURSE = {"L103", "L104", "L105", "L106", "T101", "T102", "U105"}
"""Rules about many readings in a row: among them one without a finite value does not matter."""


def metrics_of(rule: Rule) -> tuple[str, ...]:
    """What it reads; a pattern stands for one of its metrics."""
    return tuple(name.replace("*", "any") for name in rule.reads)


def strange_values() -> dict[str, np.ndarray]:
    """Readings by what is strange about them, [steps × scopes]."""
    columns = len(SCOPES)
    filled = {
        "constant": np.full((40, columns), 1.0), "nan": np.full((40, columns), np.nan),
        "inf": np.full((40, columns), np.inf), "zero": np.zeros((40, columns)),
        "negative": np.full((40, columns), -2.0), "minus inf": np.full((40, columns), -np.inf),
        "empty": np.empty((0, columns)), "one": np.full((1, columns), 2.0), "two": np.full((2, columns), 2.0),
        "huge": np.geomspace(1e-38, 3e38, 40 * columns).reshape(40, columns),
        "falling": np.geomspace(3e38, 1e-38, 40 * columns).reshape(40, columns),
        "mixed": np.resize([1.0, np.nan, np.inf, -1.0, 0.0, 1e30, 2.0], (150, columns)),
        "noise": np.random.default_rng(0).normal(size=(200, columns)),
    }  # fmt: skip
    return {name: values.astype(np.float32) for name, values in filled.items()}


def default_settings(rule: Rule) -> Settings | None:
    return None if rule.settings is None else rule.settings()


def findings_of(rule: Rule, example: Example) -> list[Finding]:
    """What the rule sees anywhere in an example."""
    rule_set = RuleSet.of([rule])
    history, judge = rule_set.history(example.info), Judge(rule_set, example.info)
    findings: list[Finding] = []
    for step, blocks in example.steps():
        findings += judge(step, history, history.append(blocks)).findings
    assert not judge.failed
    return findings


def bears_strange_values(rule: Rule, values: np.ndarray, scopes: tuple[str, ...]) -> None:
    """Nothing makes it raise, and it speaks only of what can take the finding back."""
    history = History(window=256, detail_window=16)
    settings, names = default_settings(rule), metrics_of(rule)
    for step, row in enumerate(values):
        for name in names:
            history.append([Block(step, 0.0, name, scopes, row[: len(scopes)])])
        places = [spelled_out(names[0], scope) for scope in scopes] if rule.is_about_a_pattern else scopes
        for finding in rule.judge(step, history, settings, FACTS, names):
            assert finding.code == rule.code
            assert finding.step == step
            assert finding.scope in places, "a finding has the scope of a reading that can take it back"
    rule.judge(0, History(), settings, RunInfo())


def gate_hides_nothing(rule: Rule, values: np.ndarray, scopes: tuple[str, ...]) -> None:
    """With its gate it finds what it would find without, whatever the values, and where a total of steps is known."""
    names = metrics_of(rule)
    for facts in (FACTS, dataclasses.replace(FACTS, hyperparameters={"total_steps": 50})):
        rule_sets = [RuleSet.of([kind]) for kind in (rule, dataclasses.replace(rule, gate=None))]
        judges = [(Judge(rule_set, facts), rule_set.history(facts)) for rule_set in rule_sets]
        for step, row in enumerate(values):
            blocks = [Block(step, 0.0, name, scopes, row[: len(scopes)]) for name in names]
            gated, whole = (judge(step, history, history.append(blocks)) for judge, history in judges)
            assert repr(gated.findings) == repr(whole.findings), "the gate hides a finding"
            assert gated.judged == whole.judged, "the gate judges what the rule does not"


def bears_missing_companions(rule: Rule, value: float) -> None:
    """None of the metrics in `when` makes it raise if it is the only one that was ever read."""
    settings = default_settings(rule)
    for name in [name.replace("*", "any") for name in rule.when]:
        for scopes in (SCOPES, ("",)):
            history = History()
            for step in range(40):
                history.append([Block(step, 0.0, name, scopes, np.full(len(scopes), value, np.float32))])
                rule.judge(step, history, settings, FACTS, [name])


def speaks_only_of_new_readings(rule: Rule, exempt: Collection[str] = SAID_ONCE | JUDGED_OVER_A_COURSE) -> None:
    """Once an example has fired, only a new finite reading of a metric in `when` can renew the alert, and its own."""
    for example in examples(rule):
        if not example.fires:
            continue
        for new in _later_steps(rule, example):
            run = _fed(rule, example)
            before = run.ledger.alerts
            assert before, example.text
            run.history.append(new)
            judgement = run.judge(new[0].step, run.history, new)
            run.ledger.update(judgement, run.history, run.info)
            triggers = [block for block in new if any(fnmatchcase(block.name, name) for name in rule.when)]
            read = {
                (spelled_out(block.name, scope) if rule.is_about_a_pattern else scope): value
                for block in triggers
                for scope, value in zip(block.scopes, block.values.tolist(), strict=True)
            }
            for finding in judgement.findings:
                assert triggers, "it speaks at a step at which nothing was read that it judges"
                assert finding.scope in read or rule.code in exempt, f"{finding.scope} was not read at this step"
                is_new = not math.isfinite(read.get(finding.scope, 0.0)) and not math.isfinite(finding.value)
                assert is_new or rule.code in exempt, "it takes an old reading for a new one"
            if not judgement.findings:
                renewed = {alert.identity: alert.last for alert in run.ledger.alerts}
                assert all(renewed[alert.identity] == alert.last for alert in before), "an old reading renewed an alert"


def _fed(rule: Rule, example: Example) -> Run:
    run = Run(info=example.info)
    run.judge, run.ledger = Judge(RuleSet.of([rule]), example.info), type(run.ledger)([rule])
    for step, blocks in example.steps():
        run.feed(blocks, step)
    return run


def _later_steps(rule: Rule, example: Example) -> Iterator[list[Block]]:
    """Steps after an example that hold nothing new for the rule to speak of.

    Companions alone with what they last were; and each metric in `when` alone, without a finite value, of the scopes
    that it had or of one that was never there before.
    """
    steps = list(example.steps())
    last = {block.name: block for _, blocks in steps for block in blocks}
    later = steps[-1][0] + 1
    triggers = {name for name in last if any(fnmatchcase(name, pattern) for pattern in rule.when)}
    companions = [dataclasses.replace(block, step=later) for name, block in last.items() if name not in triggers]
    if companions:
        yield companions
    for name in triggers:
        scopes = last[name].scopes
        nothing = np.full(len(scopes), np.nan, np.float32)
        yield [Block(later, 0.0, name, scopes, nothing)]
        if scopes != ("",):
            yield [Block(later, 0.0, name, ("never.seen",), nothing[:1])]


def reads_every_setting(rule: Rule) -> None:
    """Each of its settings is looked at, or read on behalf of the rule, while its examples and strange values run."""
    assert rule.settings is not None
    unread = {field.name for field in dataclasses.fields(rule.settings)} - settings_read(rule)
    assert not unread, f"{rule.name} never looks at {sorted(unread)}"


def settings_read(rule: Rule) -> set[str]:
    """The names of the settings whose values were looked at."""
    assert rule.settings is not None
    read: set[str] = set()
    recording = _recording(rule.settings, read)
    rule_set = RuleSet.of([rule])
    rule_set = dataclasses.replace(rule_set, settings={**rule_set.settings, rule.code: recording})
    for readings, facts, names in _everything_to_judge(rule):
        history = rule_set.history(facts)
        judge = rule.judging(recording, facts)
        for step, blocks in readings:
            history.append(blocks)
            judge(step, history, names)
    return read


def _recording(kind: type[Settings], read: set[str]) -> Settings:
    """Default settings that write down which of their fields are looked at, once they are made."""
    names = {field.name for field in dataclasses.fields(kind)}
    made = False

    class Recording(kind):  # type: ignore[valid-type, misc]
        def __getattribute__(self, name: str) -> Any:
            # the identity of a baseline is made of all its numbers, whether or not it goes on to use them
            if made and name in names and sys._getframe(1).f_code.co_name != "key":
                read.add(name)
            return super().__getattribute__(name)

    recording = Recording()
    made = True
    return recording


def _everything_to_judge(rule: Rule) -> Iterator[tuple[list[tuple[int, list[Block]]], RunInfo, tuple[str, ...]]]:
    derived = [one for one in derivations(RuleSet.of([rule])) if set(one.gives) & set(rule.reads)]
    names = (*metrics_of(rule), *(name for one in derived for name in one.sources if name not in rule.reads))
    for example in examples(rule):
        steps = list(example.steps())
        yield steps, example.info, tuple({block.name for _, blocks in steps for block in blocks})
    for values, scopes in itertools.product(strange_values().values(), (SCOPES, ("",))):
        yield (
            [
                (step, [Block(step, 0.0, name, scopes, row[: len(scopes)]) for name in names])
                for step, row in enumerate(values)
            ],
            FACTS,
            names,
        )


def says_what_its_settings_count(kind: type[Settings]) -> None:
    """A setting that is a length of time says whether it counts steps, readings or epochs."""
    for field in dataclasses.fields(kind):
        is_wait = any(word in field.name for word in WAITS)
        counts = field.metadata.get("counts")
        assert counts in ("steps", "readings", "epochs") or not is_wait, f"{kind.__name__}.{field.name} counts what?"


LONGEST_HEADLINE = 100


def message_fits(rule: Rule) -> None:
    """Its examples have the keys of a message, each message is used, and what they say names every number."""
    seen = [finding for example in examples(rule) if example.fires for finding in findings_of(rule, example)]
    assert seen
    used: set[Message] = set()
    for finding in seen:
        known = {"value", "bound", *finding.evidence, *(["scope", "group"] if finding.scope else [])}
        fitting = [message for message in rule.messages if message.keys <= known]
        assert fitting, f"no message has only the keys {sorted(known)}"
        used.add(fitting[0])
        says_it_plainly(tell(rule.messages, finding), finding)
    assert used == set(rule.messages), f"no example leads to {set(rule.messages) - used}"


def says_it_plainly(told: Telling, finding: Finding) -> None:
    """A headline without a full stop; numbers that each have a name; a number at all, if something was compared."""
    assert told.headline, told
    assert (
        told.headline[0].isupper()
        or told.headline.startswith((finding.scope or "\0", "`"))
        or ((told.headline[0].isdigit() and "%" in told.headline) or " of " in told.headline)
    ), told.headline
    assert not told.headline.endswith("."), told.headline
    assert len(told.headline) <= LONGEST_HEADLINE, told.headline
    for text in told:
        assert not re.search(r"[{}]|\bnan\b|\bunset\b", text), text
    if finding.bound == finding.bound and finding.bound != 0:
        assert told.numbers, f"nothing says what {finding.value} is"
    for part in filter(None, told.numbers.split(SEPARATOR)):
        assert re.match(r"[^\W\d_]{2,}", part), f"nothing says what the number in {part!r} is"


def remedies_fit(rule: Rule) -> None:
    """What it advises in its examples is an imperative without a full stop, with all its numbers filled in."""
    for example in examples(rule):
        for finding in findings_of(rule, example) if example.fires else []:
            for remedy in prescribe(rule, finding, History(), FACTS):
                assert re.match(r"[A-Z`]", remedy.do), f"{remedy.action} does not say what to do: {remedy.do!r}"
                assert not re.search(r"[{}]|\bNaN\b|\.$", remedy.do), remedy.do
                assert remedy.why, remedy
                assert not remedy.why.endswith("."), remedy.why


def numbers_are_settings(source: str) -> None:
    """No number of a rule hides in a function: it is a setting, or a constant of the file with a reason beside it."""
    tree = ast.parse(source)
    for node, after in itertools.zip_longest(tree.body, tree.body[1:]):
        if isinstance(node, ast.FunctionDef):
            numbers = {value for part in node.body for value in _numbers(part)}
            assert numbers <= SMALL, f"{node.name} compares with {sorted(numbers - SMALL)}"
        elif isinstance(node, ast.Assign) and not isinstance(node.value, ast.Call) and set(_numbers(node)) - SMALL:
            explained = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            assert explained, f"line {node.lineno}: nothing says what this number is for"


def _numbers(node: ast.AST) -> Iterator[float]:
    for part in ast.walk(node):
        if isinstance(part, ast.Constant) and isinstance(part.value, int | float) and not isinstance(part.value, bool):
            yield part.value


def reads_what_is_written(rule: Rule) -> None:
    """Each metric that it reads is in the catalogue; `tests/test_metrics.py` shows that each of those is written."""
    for name in rule.reads:
        metric = BUILT_IN.find(name)
        assert "*" in name or (metric is not None and metric.name == name), f"nobody writes {name}"


def source_of(rule: Rule) -> Path:
    return Path(inspect.getfile(rule.check))
