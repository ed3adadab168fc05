"""What holds for every rule."""

import dataclasses
import inspect
import math
import re
from pathlib import Path

import numpy as np
import pytest
from forewarn.thresholds import Thresholds

import forewarn
from forewarn.config import Config
from forewarn.judge.documentation import sample_remedies
from forewarn.judge.examples import examples
from forewarn.judge.history import History
from forewarn.judge.ledger import _chains, _Episode
from forewarn.judge.rules import all_rules, find_rule
from forewarn.settings import Settings
from forewarn.types import Block, Finding, RunInfo, Severity, is_metric_name, spelled_out
from tests.judge.rules.runs import fired, info

SOURCE = Path(forewarn.__file__).parent
FILES = {
    "L": {"loss", "learning"}, "G": {"gradients", "gain"}, "U": {"updates", "lr"}, "W": {"weights"},
    "A": {"activations", "attention", "logits", "router"},
    "E": {"evaluation"}, "T": {"tasks"}, "M": {"metrics"}, "P": {"speed", "system"}, "R": {"ranks"}, "X": {"monitor"},
}  # fmt: skip
EXAMPLES = [
    pytest.param(rule.code, example, id=f"{rule.code}-{number}")
    for rule in all_rules()
    for number, example in enumerate(examples(rule))
]
SCOPES = ("a.weight", "b.weight", "c.weight", "a.bias")
FACTS = info("a.weight", "b.weight", "c.weight", vectors=["a.bias"], groups=[{"lr": 1e-3, "weight_decay": 0.1}])

every_rule = pytest.mark.parametrize("rule", all_rules(), ids=lambda rule: rule.code)


def metrics_of(rule):
    """What it reads; a family stands for one of its metrics."""
    return tuple(name.replace("*", "any") for name in rule.reads)


@every_rule
def test_it_is_documented(rule):
    lines = rule.documentation.splitlines()
    assert re.fullmatch(r"[A-Z][^.]*\.", lines[0]), "the first line is one sentence"
    assert lines[1] == ""
    assert [line for line in lines if line.startswith("#")] == ["## Why is this bad?", "## Example"]
    assert {example.fires for example in examples(rule)} == {True, False}


@every_rule
def test_it_is_well_named(rule):
    assert re.fullmatch(r"[A-Z]\d{3}", rule.code)
    assert re.fullmatch(r"[a-z]+(-[a-z]+)*", rule.name)
    assert Path(inspect.getfile(rule.check)).stem in FILES[rule.code[0]]
    assert rule.check.__name__ == rule.name.replace("-", "_")


def test_codes_and_names_are_unique():
    rules = all_rules()
    assert len({rule.code for rule in rules}) == len({rule.name for rule in rules}) == len(rules)


@every_rule
def test_it_reads_metrics_and_is_judged_on_some_of_them(rule):
    assert all(is_metric_name(name) for name in metrics_of(rule))
    assert not rule.is_family or (rule.per_scope and rule.reads == rule.when and len(rule.reads) == 1)
    assert rule.when
    assert set(rule.when) <= set(rule.reads)
    assert rule.hold >= 1
    assert rule.keep >= 1
    assert all(find_rule(code) and code != rule.code for code in rule.explains)


@every_rule
def test_it_advises_something_with_numbers(rule):
    remedies = [remedy for remedy, _ in sample_remedies(rule)]
    assert remedies
    assert any(re.search(r"\d", str(remedy)) for remedy in remedies)
    for remedy in remedies:
        assert re.fullmatch(r"[a-z]+[a-z0-9]*(_[a-z0-9]+)*", remedy.action)
        assert remedy.why
        assert remedy.safety in ("notify", "safe", "opt_in")


@every_rule
def test_its_advice_copes_with_a_run_that_nothing_is_known_of(rule):
    for evidence in ({}, {"ratio": math.nan, "lasting_steps": 3}, {"ratio": math.inf, "lr_before": 0.0}):
        finding = Finding(rule.code, "", 0, Severity.WARNING, math.nan, math.inf, evidence)
        for make in rule.remedies:
            remedy = make(finding, History(), RunInfo())
            assert remedy is None or str(remedy)


@pytest.mark.parametrize(("code", "example"), EXAMPLES)
def test_its_examples_hold(code, example):
    assert fired(example, code) == example.fires, example.text


def strange_values():
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
    return [pytest.param(values.astype(np.float32), id=name) for name, values in filled.items()]


@every_rule
@pytest.mark.parametrize("values", strange_values())
@pytest.mark.parametrize("scopes", [SCOPES, ("",), ("", *SCOPES[1:]), ()], ids=["tensors", "run", "both", "none"])
def test_nothing_makes_it_raise(rule, values, scopes):
    history = History(window=256, detail_window=16)
    for step, row in enumerate(values):
        names = metrics_of(rule)
        for name in names:
            history.append([Block(step, 0.0, name, scopes, row[: len(scopes)])])
        places = [spelled_out(names[0], scope) for scope in scopes] if rule.is_family else scopes
        for finding in rule.judge(step, history, Config(), FACTS, names):
            assert finding.code == rule.code
            assert finding.step == step
            assert finding.scope in places, "a finding has the scope of a reading that can take it back"
    rule.judge(0, History(), Config(), RunInfo())


@every_rule
def test_a_missing_companion_makes_it_neither_raise_nor_speak_of_old_readings(rule):
    history = History()
    for step in range(40):
        name = rule.when[0].replace("*", "any")
        history.append([Block(step, 0.0, name, SCOPES, np.full(len(SCOPES), 1e-9, np.float32))])
        rule.judge(step, history, Config(), FACTS, [name])


@every_rule
def test_its_evidence_is_numbers_or_names(rule):
    for example in examples(rule):
        history = History()
        for step, blocks in example.steps():
            history.append(blocks)
            for finding in rule.judge(step, history, Config(), example.info, [block.name for block in blocks]):
                for name, value in finding.evidence.items():
                    assert re.fullmatch(r"[a-z]+(_[a-z0-9]+)*", name)
                    assert isinstance(value, int | float | str)


def test_every_table_of_thresholds_belongs_to_exactly_one_rule():
    wanted = sorted(rule.name.replace("-", "_") for rule in all_rules() if rule.wants_config)
    assert sorted(field.name for field in dataclasses.fields(Thresholds)) == wanted


def test_every_threshold_is_read():
    code = "\n".join(path.read_text() for path in SOURCE.rglob("*.py") if path.name != "config.py")
    series = (SOURCE / "series.py").read_text()
    for table in dataclasses.fields(Thresholds):
        settings = getattr(Thresholds(), table.name)
        assert isinstance(settings, Settings)
        rule = find_rule(table.name.replace("_", "-"))
        family = Path(inspect.getfile(rule.check)).read_text()
        for field in dataclasses.fields(settings):
            read = re.compile(rf"\b(config|spike|{table.name})\.{field.name}\b")
            shared = series if field.name in ("k", "floor", "window", "minimum", "readmit_after") else ""
            assert read.search(family) or read.search(shared) or read.search(code), f"{table.name}.{field.name}"


def test_no_number_of_a_rule_hides_outside_the_config():
    for letter in "LGTUWEMX":
        for stem in FILES[letter]:
            source = (SOURCE / "rules" / f"{stem}.py").read_text()
            body = re.sub(r'""".*?"""|"[^"\n]*"|#.*', "", source, flags=re.DOTALL)
            body = re.sub(r"(hold|keep)=\d+|(lower_lr|raise_lr|lower_weight_decay)\([\d.]+|to=1e-5", "", body)
            body = re.sub(r"_quantile\(\w+(\[\w+\])?, 0\.\d+\)|_MEDIAN_ERROR = [\d.]+", "", body)
            body = re.sub(r"_MOST_POINTS = \d+|_SLOPE_ERROR = math\.sqrt\(12\)", "", body)
            numbers = {float(each) for each in re.findall(r"(?<![\w.])\d+\.?\d*(?:e-?\d+)?(?![\w.])", body)}
            assert numbers <= {0, 1, 2, 3, 4}, f"{stem}.py compares with {sorted(numbers)}"


def test_explanations_of_one_step_never_go_in_circles():
    episodes = [_Episode(rule.code, 5, 5, 50, Severity.WARNING) for rule in all_rules()]
    chains = _chains(episodes, lambda code: find_rule(code).explains)
    for root, depth in chains.values():
        assert chains[root] == (root, 0)
        assert depth < len(episodes)
