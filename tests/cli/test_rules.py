"""`forewarn rules` and `forewarn explain`."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from forewarn.judge.rules import Rule, all_rules
from forewarn.types import in_words
from tests.cli.conftest import Said

Call = Callable[..., Said]


def test_every_rule_is_listed(forewarn: Call) -> None:
    said = forewarn("rules")
    assert said.code == 0
    for rule in all_rules():
        assert rule.code in said.out
        assert rule.name in said.out


def test_json_holds_every_rule(forewarn: Call) -> None:
    found = json.loads(forewarn("rules", "--json").out)
    assert [one["code"] for one in found] == [rule.code for rule in all_rules()]
    assert all(one["summary"] and one["reads"] for one in found)


@pytest.mark.parametrize("rule", all_rules(), ids=lambda rule: rule.name)
def test_a_rule_is_explained_by_code_and_by_name_with_its_thresholds(forewarn: Call, rule: Rule) -> None:
    said = forewarn("explain", rule.code)
    assert said.code == 0
    assert said == forewarn("explain", rule.name)
    assert f"{rule.code} {rule.name}" in said.out
    assert "Why is this bad?" in said.out
    if rule.settings is not None:
        for name, value in rule.settings().to_dict().items():
            assert any(line.split()[:2] == [name, in_words(value)] for line in said.out.splitlines())


def test_a_threshold_is_explained_also_where_it_is_inherited(forewarn: Call) -> None:
    said = forewarn("explain", "L102")
    assert "[thresholds.loss_spike]" in said.out
    lines = [" ".join(line.split()) for line in said.out.splitlines()]
    assert "lost_steps 20 Steps in a row after which the spike is critical: the loss is not coming" in lines
    assert "window 64 Number of accepted values in the level." in lines


def test_examples_keep_their_lines(forewarn: Call) -> None:
    lines = [line.strip() for line in forewarn("explain", "L102").out.splitlines()]
    assert any(line.startswith("fires: ") for line in lines)
    assert any(line.startswith("quiet: ") for line in lines)
    assert any(line.startswith("2.0x5 is 2.0 five times, 2.0+0.5x3 is 2.0 2.5 3.0") for line in lines)


def test_an_unknown_rule_gets_a_suggestion(forewarn: Call) -> None:
    said = forewarn("explain", "loss-spikes")
    assert said.code == 3
    assert "did you mean loss-spike" in said.err
