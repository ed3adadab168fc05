"""The ledger: the life of an alert, and which of several is the cause."""

import itertools

import numpy as np
import pytest

from forewarn.judge.chains import chains_of
from forewarn.judge.families import BY_LETTER
from forewarn.judge.headlines import Message
from forewarn.judge.history import History
from forewarn.judge.judgement import Judgement
from forewarn.judge.ledger import Ledger, prescribe
from forewarn.judge.registry import Rule
from forewarn.types import AlertState, Block, Finding, Remedy, RunInfo, Severity
from tests.judge.rules.runs import Run, info

METRIC = "train/loss"


def rule(code, hold=1, keep=10, explains=(), remedies=()):
    name = f"rule-{code.lower()}"
    return Rule(
        code=code, name=name, family=BY_LETTER[code[0]], reads=(METRIC,), when=(METRIC,), check=lambda loss: None,
        hold=hold, keep=keep, remedies=remedies, explains=explains, messages=(Message("It is wrong"),),
    )  # fmt: skip


def finding(code, step, severity=Severity.WARNING, scope="", value=1.0, **evidence):
    return Finding(code, scope, step, severity, value, 0.0, evidence)


class Life:
    """A ledger that is told what was found at each step; every rule looks at every scope at every step."""

    def __init__(self, *rules, scopes=("", "a", "b")):
        self.rules, self.scopes = rules, scopes
        self.ledger = Ledger(rules)

    def step(self, step, *findings, judged=None, values=None):
        codes = [each.code for each in self.rules] if judged is None else judged
        block = Block(step, 0.0, METRIC, self.scopes, np.array(values or [1.0] * len(self.scopes), np.float32))
        judgement = Judgement(step, [block], dict.fromkeys(codes, (METRIC,)), findings)
        return self.ledger.update(judgement, History(), RunInfo())


def test_it_fires_once_it_has_persisted_for_the_hold_and_not_before():
    life = Life(rule("L900", hold=3))
    assert life.step(5, finding("L900", 5)) == ()
    assert life.step(6, finding("L900", 6)) == ()
    assert life.ledger.alerts == life.ledger.firing == ()
    (alert,) = life.step(7, finding("L900", 7))
    assert (alert.state, alert.since, alert.fired, alert.last) == (AlertState.FIRING, 5, 7, 7)
    assert life.step(8, finding("L900", 8)) == (), "that it goes on is no news"
    assert life.ledger.firing[0].last == 8


def test_what_passes_before_the_hold_was_never_there():
    life = Life(rule("L900", hold=3))
    life.step(5, finding("L900", 5))
    life.step(6, finding("L900", 6))
    life.step(7)
    life.step(8, finding("L900", 8))
    life.step(9, finding("L900", 9))
    assert life.ledger.alerts == ()
    (alert,) = life.step(10, finding("L900", 10))
    assert alert.since == 8


def test_the_hold_counts_checks_and_not_steps():
    life = Life(rule("L900", hold=3))
    for step in range(201):
        if step % 100 == 0:
            life.step(step, finding("L900", step))
        else:
            life.step(step, judged=())
    assert (life.ledger.firing[0].since, life.ledger.firing[0].fired) == (0, 200)


def test_it_stays_open_for_as_long_as_it_is_kept_and_is_then_resolved():
    life = Life(rule("L900", keep=10))
    life.step(5, finding("L900", 5))
    for step in range(6, 15):
        assert life.step(step) == ()
    (alert,) = life.step(15)
    assert (alert.state, alert.last) == (AlertState.RESOLVED, 5)
    assert life.ledger.firing == ()
    assert life.ledger.alerts == (alert,)


def test_what_comes_back_while_it_is_open_is_the_same_alert():
    life = Life(rule("L900", keep=10))
    life.step(5, finding("L900", 5))
    for step in range(6, 40):
        life.step(step, *([finding("L900", step)] if step % 8 == 0 else []))
    (alert,) = life.ledger.alerts
    assert (alert.since, alert.last) == (5, 32)


def test_the_finding_with_which_it_fired_is_kept_beside_the_newest():
    life = Life(rule("L900", hold=2, keep=10))
    for step in range(4):
        life.step(step, finding("L900", step))
    (alert,) = life.ledger.alerts
    assert (alert.announced.step, alert.finding.step) == (1, 3)
    life.step(4, finding("L900", 4, Severity.CRITICAL))
    life.step(5, finding("L900", 5, Severity.CRITICAL))
    (alert,) = life.ledger.alerts
    assert (alert.announced.step, alert.finding.step) == (4, 5), "it grew worse: the remedies are for that finding"


def test_what_comes_back_later_is_another():
    life = Life(rule("L900", keep=5))
    for step in range(40):
        life.step(step, *([finding("L900", step)] if step in (5, 30) else []))
    assert [alert.since for alert in life.ledger.alerts] == [5, 30]


def test_it_is_kept_open_while_nobody_looks():
    life = Life(rule("L900", keep=5))
    life.step(5, finding("L900", 5))
    for step in range(6, 50):
        life.step(step, judged=())
    assert life.ledger.firing


def test_only_a_new_reading_of_its_own_scope_takes_it_back():
    life = Life(rule("L900", keep=5), scopes=("", "a"))
    life.step(5, finding("L900", 5, scope="b"), finding("L900", 5, scope="a"))
    (alert,) = life.step(20)
    assert alert.scope == "a"
    assert [each.scope for each in life.ledger.firing] == ["b"]


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_reading_that_is_not_finite_is_no_sign_of_health(value):
    life = Life(rule("L900", keep=5))
    life.step(5, finding("L900", 5))
    assert life.step(20, values=[value, 1.0, 1.0]) == ()
    assert life.ledger.firing


def test_it_takes_on_the_worst_severity_and_says_so():
    life = Life(rule("L900"))
    life.step(5, finding("L900", 5, Severity.INFO))
    (alert,) = life.step(6, finding("L900", 6, Severity.CRITICAL, value=9.0))
    assert (alert.severity, alert.since, alert.finding.value) == (Severity.CRITICAL, 5, 9.0)
    assert life.step(7, finding("L900", 7, Severity.INFO, value=2.0)) == ()
    alert = life.ledger.firing[0]
    assert (alert.severity, alert.finding.value, alert.last) == (Severity.CRITICAL, 9.0, 7)


@pytest.mark.parametrize("first", [Severity.INFO, Severity.CRITICAL])
def test_before_it_fires_it_is_as_severe_as_its_newest_check(first):
    life = Life(rule("L900", hold=2))
    life.step(5, finding("L900", 5, first, value=9.0))
    (alert,) = life.step(6, finding("L900", 6, Severity.WARNING, value=2.0))
    assert (alert.severity, alert.since, alert.announced.value) == (Severity.WARNING, 5, 2.0)


def test_information_that_had_passed_is_not_how_a_warning_began():
    life = Life(rule("G900", keep=20))
    life.step(5, finding("G900", 5, Severity.INFO))
    life.step(6)
    resolved, fired = sorted(life.step(10, finding("G900", 10)), key=lambda alert: alert.since)
    assert (resolved.state, resolved.severity) == (AlertState.RESOLVED, Severity.INFO)
    assert (fired.state, fired.since) == (AlertState.FIRING, 10)


def test_remedies_are_made_anew_when_it_grows_worse():
    def snapshot(finding, history, info):
        return Remedy("look", {"step": finding.step}, "why")

    life = Life(rule("L900", remedies=(snapshot,)))
    life.step(5, finding("L900", 5, Severity.INFO))
    life.step(6, finding("L900", 6, Severity.INFO))
    assert str(life.ledger.firing[0].remedies[0]) == "look step 5"
    life.step(7, finding("L900", 7, Severity.CRITICAL))
    assert str(life.ledger.firing[0].remedies[0]) == "look step 7"


def test_advice_that_fails_is_left_out(caplog):
    def broken(finding, history, info):
        raise KeyError("lr")

    made = rule("L900", remedies=(broken, lambda *given: None, lambda *given: Remedy("stop", {}, "why")))
    assert [remedy.action for remedy in prescribe(made, finding("L900", 1), History(), RunInfo())] == ["stop"]
    assert "a remedy of L900 rule-l900 failed" in caplog.text


def test_each_scope_is_an_alert_of_its_own():
    life = Life(rule("G900"))
    life.step(5, finding("G900", 5, scope="a"), finding("G900", 5, scope="b"), finding("G900", 5, scope="a"))
    assert [alert.identity for alert in life.ledger.alerts] == [("G900", "a"), ("G900", "b")]


def test_findings_of_rules_that_are_off_are_ignored():
    assert Life(rule("L900")).step(5, finding("L901", 5)) == ()


# causes and symptoms


def ranked(rules, *findings, shuffle=True):
    """The codes, most important first; the order in which they are told must not matter."""
    orders = itertools.permutations(findings) if shuffle and len(findings) <= 4 else [findings]
    answers = set()
    for order in orders:
        life = Life(*rules)
        for step in sorted({each.step for each in order}):
            life.step(step, *(each for each in order if each.step == step))
        answers.add(tuple(alert.code for alert in life.ledger.firing))
    (answer,) = answers
    return list(answer)


def test_the_cause_is_ranked_above_worse_symptoms():
    rules = [rule("L900", keep=99), rule("U900", keep=99, explains=("L900", "G900")), rule("G900", keep=99)]
    found = finding("U900", 5), finding("G900", 6), finding("L900", 7, Severity.CRITICAL)
    assert ranked(rules, *found) == ["U900", "L900", "G900"]


def test_the_worst_chain_comes_first():
    rules = [rule("L900", keep=99), rule("U900", keep=99, explains=("L900",)), rule("W900", keep=99)]
    found = finding("W900", 1), finding("U900", 5), finding("L900", 7, Severity.CRITICAL)
    assert ranked(rules, *found) == ["U900", "L900", "W900"]


def test_a_cause_does_not_come_after_its_symptom():
    rules = [rule("L900", keep=99), rule("U900", keep=99, explains=("L900",))]
    assert ranked(rules, finding("L900", 5), finding("U900", 6)) == ["L900", "U900"]


def test_chains_of_causes_are_followed_to_their_root():
    rules = [
        rule("L900", keep=99),
        rule("G900", keep=99, explains=("L900",)),
        rule("U900", keep=99, explains=("G900",)),
    ]
    life = Life(*rules)
    for step, code in enumerate(("U900", "G900", "L900")):
        life.step(step, finding(code, step))
    assert [alert.code for alert in life.ledger.firing] == ["U900", "G900", "L900"]
    assert life.ledger.causes(life.ledger.alerts) == {("G900", 1): "U900", ("L900", 2): "U900"}


mutual = [rule("L900", keep=99, explains=("G900",)), rule("G900", keep=99, explains=("L900",))]


def test_of_two_that_explain_each_other_the_first_is_the_cause():
    assert ranked(mutual, finding("G900", 5), finding("L900", 6)) == ["G900", "L900"]
    assert ranked(mutual, finding("L900", 5), finding("G900", 6)) == ["L900", "G900"]


def test_at_the_same_step_the_one_that_a_step_meets_first_is():
    assert ranked(mutual, finding("G900", 5), finding("L900", 5)) == ["L900", "G900"]


def test_a_circle_of_three_at_one_step_has_an_end():
    rules = [
        rule("L900", keep=99, explains=("G900",)), rule("G900", keep=99, explains=("U900",)),
        rule("U900", keep=99, explains=("L900",)),
    ]  # fmt: skip
    assert ranked(rules, *(finding(code, 5) for code in ("L900", "G900", "U900"))) == ["L900", "G900", "U900"]


def test_what_nothing_explains_may_come_from_outside_the_step():
    rules = [
        rule("W900", keep=99, explains=("L900", "G900")),
        rule("L900", keep=99, explains=("G900",)),
        rule("G900", keep=99),
    ]
    found = finding("W900", 5), finding("L900", 5, Severity.CRITICAL), finding("G900", 5)
    assert ranked(rules, *found)[0] == "W900"


def test_what_was_over_before_explains_nothing():
    rules = [rule("G900", keep=5, explains=("U900",)), rule("U900", keep=99, explains=("G900",))]
    life = Life(*rules)
    for step in range(35):
        found = {3: [finding("G900", 3)], 30: [finding("U900", 30)], 31: [finding("G900", 31)]}.get(step, [])
        life.step(step, *found)
    assert [alert.code for alert in life.ledger.firing] == ["U900", "G900"]
    order = [(alert.code, alert.since) for alert in life.ledger.ranked(life.ledger.alerts)]
    assert order[0] == ("U900", 30)
    (update,) = (alert for alert in life.ledger.alerts if alert.code == "U900")
    assert ("U900", update.since) not in life.ledger.causes(life.ledger.alerts)


def test_what_was_over_when_it_was_seen_but_not_when_it_began_is_the_cause():
    rules = [rule("U902", keep=5, explains=("U901",)), rule("U901", keep=99)]
    life = Life(*rules)
    for step in range(61):
        found = {3: [finding("U902", 3)], 60: [finding("U901", 60, lasting_steps=54)]}.get(step, [])
        life.step(step, *found)
    assert [alert.code for alert in life.ledger.ranked(life.ledger.alerts)] == ["U902", "U901"]


def test_information_is_no_reason_for_a_warning():
    rules = [rule("G900", keep=99, explains=("U900",)), rule("U900", keep=99)]
    assert ranked(rules, finding("G900", 5, Severity.INFO), finding("U900", 6)) == ["U900", "G900"]


def test_a_slow_rise_began_before_it_was_seen():
    rules = [rule("L901", keep=99, explains=("L900",)), rule("L900", keep=99)]
    assert ranked(rules, finding("L900", 50), finding("L901", 90, lasting_steps=80)) == ["L901", "L900"]
    assert ranked(rules, finding("L900", 50), finding("L901", 90, lasting_steps=20)) == ["L900", "L901"]


def test_what_was_first_said_about_the_beginning_holds_when_it_rises_again():
    life = Life(rule("L901", keep=99, explains=("L900",)), rule("L900", keep=99))
    life.step(50, finding("L900", 50))
    life.step(70, finding("L901", 70, lasting_steps=40))
    life.step(90, finding("L901", 90, lasting_steps=10))
    assert [alert.code for alert in life.ledger.ranked(life.ledger.alerts)] == ["L901", "L900"]


def test_what_still_fires_comes_before_what_was_resolved():
    life = Life(rule("L900", keep=3), rule("G900", keep=99))
    life.step(1, finding("L900", 1, Severity.CRITICAL))
    life.step(2, finding("G900", 2, Severity.INFO))
    life.step(10)
    assert [alert.code for alert in life.ledger.ranked(life.ledger.alerts)] == ["G900", "L900"]


# the causal order of real rules


def test_a_bad_batch_is_named_before_what_it_destroys():
    run = Run("L101", "G101", "W101")
    run.feed({"train/loss": 2.0, "gradient/global_norm": 1.0})
    run.feed({
        "weight/nonfinite": {"a.weight": 9.0}, "gradient/global_norm": np.nan, "gradient/nonfinite": {"a.weight": 9.0},
        "train/loss": np.nan,
    })  # fmt: skip
    assert [alert.code for alert in run.ledger.firing] == ["L101", "G101", "G101", "W101"]


def test_a_nan_in_the_backward_pass_is_named_before_the_loss_that_follows():
    run = Run("L101", "G101", "W101")
    run.feed({"train/loss": 2.0, "gradient/global_norm": np.nan})
    run.feed({"train/loss": np.nan, "gradient/global_norm": np.nan, "weight/nonfinite": {"a.weight": 9.0}})
    assert [alert.code for alert in run.ledger.firing] == ["G101", "L101", "W101"]


def test_a_damaged_checkpoint_is_named_before_the_loss_that_follows():
    run = Run("L101", "G101", "W101")
    run.feed({"train/loss": 2.0, "gradient/global_norm": 1.0, "weight/nonfinite": {"a.weight": 1.0}})
    run.feed({"train/loss": np.nan, "gradient/global_norm": np.nan})
    assert [alert.code for alert in run.ledger.firing] == ["W101", "L101", "G101"]


def test_an_lr_jump_is_named_before_everything_that_it_leads_to():
    run = Run(info=info("a.weight", "b.weight", "c.weight"))
    rng = np.random.default_rng(0)
    for step in range(300):
        jumped = max(0, step - 250)
        wild = min(4.0**jumped, 1e4)
        norm = 1.2**jumped * float(np.exp(0.2 * rng.normal()))
        readings = {
            "train/loss": 2.0 * float(np.exp(0.02 * rng.normal())) * min(wild, 50),
            "train/lr": {"0": 1e-3 if step < 250 else 3e-2},
            "gradient/global_norm": norm * wild,
            "update/optimizer_steps": 1.0,
        }
        if step < 10 or step % 100 == 0 or step <= run.schedule.until:
            ratio = 8 * readings["train/lr"]["0"]
            weights = dict.fromkeys(("a.weight", "b.weight", "c.weight"), 5.0 * 1.3**jumped)
            readings |= {
                "update/ratio": dict.fromkeys(weights, ratio), "monitor/update_ratio_median": ratio,
                "weight/norm": weights, "weight/nonfinite": dict.fromkeys(weights, 0.0),
            }  # fmt: skip
        run.feed(readings)
    codes = [alert.code for alert in run.ledger.firing]
    assert codes[0] == "U104"
    assert {"L102", "G102", "G104", "U102", "W102"} <= set(codes)
    first = {alert.code: alert.since for alert in run.ledger.alerts if alert.severity > Severity.INFO}
    assert first["U104"] == 250 < min(since for code, since in first.items() if code != "U104")


# saving


def episodes_at_random(seed):
    rng = np.random.default_rng(seed)
    severities = list(Severity)
    for step in range(120):
        yield (
            step,
            [
                finding(code, step, severities[rng.integers(3)], scope)
                for code in ("L900", "G900")
                for scope in ("", "a")
                if rng.random() < 0.3
            ],
        )


@pytest.mark.parametrize("saved_at", [0, 1, 17, 60, 119])
@pytest.mark.parametrize("seed", range(3))
def test_a_ledger_goes_on_where_it_was_saved(seed, saved_at):
    rules = (rule("L900", hold=2, keep=4, explains=("G900",)), rule("G900", keep=7))
    straight, halted = Life(*rules), Life(*rules)
    for step, findings in episodes_at_random(seed):
        if step == saved_at:
            state = halted.ledger.state_dict()
            halted.ledger = Ledger(rules)
            halted.ledger.load_state_dict(state)
        assert straight.step(step, *findings) == halted.step(step, *findings)
    assert straight.ledger.alerts == halted.ledger.alerts
    assert straight.ledger.firing == halted.ledger.firing


def test_alerts_of_a_rule_that_is_off_after_a_resume_do_no_harm():
    life = Life(rule("L900"), rule("G900"))
    life.step(5, finding("L900", 5), finding("G900", 5))
    resumed = Life(rule("G900"))
    resumed.ledger.load_state_dict(life.ledger.state_dict())
    resumed.step(6, finding("G900", 6))
    assert [alert.code for alert in resumed.ledger.firing] == ["G900"]
    resumed.ledger.ranked(life.ledger.alerts)


@pytest.mark.parametrize("seed", range(20))
def test_the_cause_with_which_it_fires_is_that_among_all_alerts(seed):
    generator = np.random.default_rng(seed)
    codes = ["L900", "G900", "U900", "W900"]
    rules = [rule(code, keep=3, explains=tuple(codes[index + 1 :])) for index, code in enumerate(codes)]
    life, followed = Life(*rules, scopes=("",)), 0
    for step in range(150):
        seen = [code for code in codes if generator.random() < 0.08]
        lasting = [int(generator.integers(1, 30)) if generator.random() < 0.2 else 1 for _ in seen]
        found = (finding(code, step, lasting_steps=steps) for code, steps in zip(seen, lasting, strict=True))
        changed = life.step(step, *found)
        causes = life.ledger.causes(life.ledger.alerts)
        for alert in changed:
            if alert.state is AlertState.FIRING:
                assert alert.follows == causes.get((alert.code, alert.since), "")
                followed += alert.follows != ""
    assert followed


def test_an_alert_that_stays_open_does_not_make_every_later_one_look_at_all_before_it(monkeypatch):
    looked_at = []

    def counted(*arguments):
        looked_at.append(len(chains := chains_of(*arguments)))
        return chains

    monkeypatch.setattr("forewarn.judge.ledger.chains_of", counted)
    life = Life(rule("L900"), rule("G900", explains=("L901",)), rule("L901", explains=("G900",)))
    for step in range(0, 2000, 2):
        spike = [finding("G900", step), finding("L901", step)] if step % 20 == 0 else []
        life.step(step, finding("L900", step), *spike)
    assert len(life.ledger.alerts) == 201
    assert max(looked_at) <= 3
