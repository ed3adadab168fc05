"""How rules are declared, found and judged."""

from dataclasses import replace

import numpy as np
import pytest

from forewarn.config import Config
from forewarn.judge.families import Family
from forewarn.judge.history import History
from forewarn.judge.judgement import Judge, RuleSet
from forewarn.judge.ledger import Ledger
from forewarn.judge.registry import Rule, check_distinct, finding
from forewarn.judge.rules import all_rules, find_rule
from forewarn.types import Block, Finding, RunInfo, Severity
from tests.judge.rules.runs import block


def made(check, reads=("train/loss",), when=(), per_scope=False, code="L900"):
    return Rule(
        code=code, name="made-up", family=Family.LOSS, reads=reads, when=when or reads[:1], check=check,
        per_scope=per_scope, keep=10,
    )  # fmt: skip


def judge(rules, *blocks, step=0):
    history = History()
    history.append(blocks)
    return Judge(RuleSet.of(rules), RunInfo())(step, history, blocks)


def test_a_rule_is_found_by_code_and_by_name_in_any_case():
    assert find_rule("l102") is find_rule(" Loss-Spike ") is find_rule("L102")


def test_a_wrong_name_comes_with_a_suggestion():
    with pytest.raises(ValueError, match="there is no rule 'loss-spikes'; did you mean 'loss-spike'"):
        find_rule("loss-spikes")
    with pytest.raises(ValueError, match="`forewarn rules` lists them all"):
        find_rule("zzzzzz")


def test_rules_are_switched_off_by_code_or_name():
    judged = Config(disable=["L102", "gradient-spike"]).rule_set()
    off = {"L102", "G104", "M104"}  # the last one judges only metrics that the config names
    assert {rule.code for rule in all_rules()} - {rule.code for rule in judged.rules} == off
    assert {rule.code for rule in judged.disabled} == off
    with pytest.raises(ValueError, match="there is no rule"):
        Config(disable=["nonsense"]).rule_set()


def test_a_code_a_name_and_a_class_of_settings_are_never_used_twice():
    spike = find_rule("L102")
    for other in (replace(spike, name="something-new"), replace(spike, code="L999")):
        with pytest.raises(ValueError, match="declared twice"):
            check_distinct([*all_rules(), other])
    with pytest.raises(ValueError, match="already belong to loss-spike; derive a separate class"):
        check_distinct([*all_rules(), replace(spike, code="L999", name="something-new")])


def test_a_rule_is_judged_only_when_there_is_something_new():
    calls = []
    judgement = judge([made(lambda loss: calls.append(1))], block(0, "train/lr", {"0": 1.0}))
    assert calls == []
    assert judgement.judged == {}


def test_a_rule_with_several_triggers_is_judged_once_per_step():
    calls = []
    two = ("train/loss", "gradient/norm")
    rules = [made(lambda *given: calls.append(1), reads=two, when=two)]
    judgement = judge(rules, block(0, "train/loss", 1.0), block(0, "gradient/norm", {"a": 1.0, "b": np.nan}))
    assert calls == [1]
    assert judgement.covered("L900") == {"", "a"}
    assert judgement.covered("L901") == set()


def test_code_and_step_are_filled_in():
    judgement = judge(
        [made(lambda loss: finding(Severity.INFO, 3.0, 2.0, "a", ratio=1.5))], block(7, "train/loss", 3.0), step=7
    )
    assert judgement.findings == (Finding("L900", "a", 7, Severity.INFO, 3.0, 2.0, {"ratio": 1.5}),)


def test_a_check_may_return_one_finding_many_or_none():
    def many(panel):
        yield finding(Severity.INFO, 1, 0, "a")
        yield finding(Severity.INFO, 1, 0, "b")

    assert len(judge([made(many, per_scope=True)], block(0, "train/loss", 1.0)).findings) == 2
    assert judge([made(lambda loss: None)], block(0, "train/loss", 1.0)).findings == ()


def test_a_rule_that_raises_is_switched_off_and_becomes_an_alert(caplog):
    def broken(loss):
        raise ZeroDivisionError("no luck")

    rules = [made(broken), find_rule("X102")]
    judge, ledger, history = Judge(RuleSet.of(rules), RunInfo()), Ledger(rules), History()
    for step in range(200):
        blocks = [block(step, "train/loss", 1.0)]
        history.append(blocks)
        ledger.update(judge(step, history, blocks), history, RunInfo())
    assert judge.failed == {"L900"}
    (alert,) = ledger.firing
    assert (alert.code, alert.scope, alert.since) == ("X102", "made-up", 0)
    assert str(alert.remedies[0]) == "report_bug rule made-up step 0"
    assert caplog.text.count("the rule L900 made-up failed and is switched off") == 1


def test_a_rule_that_raises_does_not_take_its_own_alerts_back():
    answers = iter([finding(Severity.WARNING, 1, 0), ZeroDivisionError()])

    def moody(loss):
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    rules = [made(moody)]
    judge, ledger, history = Judge(RuleSet.of(rules), RunInfo()), Ledger(rules), History()
    for step in (0, 100):
        blocks = [block(step, "train/loss", 1.0)]
        history.append(blocks)
        ledger.update(judge(step, history, blocks), history, RunInfo())
    assert [alert.code for alert in ledger.firing] == ["L900"]


def test_live_and_replayed_values_are_the_same_float32():
    seen = []
    judge(
        [made(lambda loss: seen.append(loss.values.dtype))],
        Block(0, 0.0, "train/loss", ("",), np.array([0.1], np.float32)),
    )
    assert seen == [np.dtype(np.float32)]
