"""Which actions a policy takes for which alert, and how it is read."""

import pytest

import forewarn
from forewarn.act.decisions import Decisions
from forewarn.policy import PRESETS, Policy
from forewarn.types import Alert, AlertState, Finding, Remedy, Severity


def alert(code="L102", name="loss-spike", severity=Severity.CRITICAL, step=5, **more) -> Alert:
    finding = Finding(code, "", step, severity, 9.0, 3.0)
    fields = {"since": step, "fired": step, "last": step, "finding": finding} | more
    return Alert(code, name, "", severity, AlertState.FIRING, **fields)


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ({"L102": "stop", "loss": "snapshot", "critical": "lower_lr"}, ("stop",)),
        ({"Loss-Spike": ["notify", "stop"], "L": "snapshot"}, ("notify", "stop")),
        ({"L": "snapshot", "critical": "lower_lr"}, ("snapshot",)),
        ({"loss": "snapshot", "critical": "lower_lr"}, ("snapshot",)),
        ({"info": "notify", "warning": "lower_lr"}, ("lower_lr",)),
        ({"gradients": "stop", "U": "stop"}, ()),
    ],
)
def test_the_most_specific_entry_decides(rules, expected):
    assert Policy(rules).checked().actions_for(alert()) == expected


def test_information_never_changes_a_run():
    policy = Policy({"loss-spike": ["notify", "snapshot", "lower_lr", "stop"]})
    assert policy.actions_for(alert(severity=Severity.INFO)) == ("notify", "snapshot")


def decided(policy, alerts, steps, obstacle=lambda action, alert: ""):
    decisions = Decisions(Policy.of(policy))
    taken = []
    for step in steps:
        decisions.step()
        seen = [alert(**{"since": 0} | one, step=step) for one in alerts]
        taken += [(step, decision.action) for decision in decisions.decide(seen, step, obstacle)]
    return taken


def test_an_action_rests_after_its_use_and_the_next_one_follows_when_its_budget_is_used_up():
    policy = {"rules": {"critical": ["lower_lr", "stop"]}, "lower_lr": {"times": 2, "cooldown": 3}}
    assert decided(policy, [{}], range(20)) == [(0, "lower_lr"), (4, "lower_lr"), (5, "stop")]


def test_an_action_that_cannot_help_is_passed_over():
    refused = decided({"critical": ["roll_back", "stop"]}, [{}], [0], lambda action, _: "no" * (action == "roll_back"))
    assert refused == [(0, "stop")]
    assert decided({"critical": ["skip_batch", "stop"]}, [{}], [0], lambda action, _: None) == []
    alone = decided({"critical": ["skip_batch", "roll_back"]}, [{}], range(5), lambda *_: "no")
    assert alone == [(0, "roll_back")], "the record says once why it was refused"


def test_a_step_has_one_snapshot_beside_one_action_that_changes_the_run_but_a_message_for_each_alert():
    policy = {"rules": {"critical": ["snapshot", "lower_lr"]}, "snapshot": {"cooldown": 0}, "lower_lr": {"cooldown": 0}}
    alerts = [{}, {"code": "G104", "name": "gradient-spike"}]
    assert decided(policy, alerts, [0]) == [(0, "snapshot"), (0, "lower_lr")]
    assert decided({"critical": "notify"}, alerts, [0, 1]) == [(0, "notify"), (0, "notify")]


def test_symptoms_are_left_to_the_action_for_their_cause():
    symptom = {"code": "G104", "name": "gradient-spike", "follows": "L102"}
    policy = {"loss-spike": "lower_lr", "gradient-spike": "stop"}
    assert decided(policy, [symptom, {}], [0]) == [(0, "lower_lr")]
    assert decided({"gradient-spike": "stop"}, [symptom, {}], [0]) == [(0, "stop")]


def test_a_symptom_worse_than_its_cause_is_acted_on_itself():
    cause = {"code": "U104", "name": "update-ratio-jump", "severity": Severity.WARNING}
    symptom = {"code": "L101", "name": "non-finite-loss", "follows": "U104"}
    policy = {"rules": {"U104": "lower_lr", "L101": "roll_back"}, "lower_lr": {"times": 1}}
    assert decided(policy, [symptom | {"severity": Severity.WARNING}, cause], [0, 1]) == [(0, "lower_lr")]
    assert decided(policy, [symptom, cause], [0]) == [(0, "roll_back")]


def test_the_rate_from_before_a_jump_is_restored_however_low_it_is():
    finding = Finding("U104", "", 5, Severity.WARNING, 9.0, 3.0, {"lr_before": 0.001})
    remedies = (Remedy("lower_lr", {"from": 1.0, "to": 0.001}, ""),)
    decisions = Decisions(Policy({"critical": "lower_lr"}))
    (decision,) = decisions.decide([alert(finding=finding, remedies=remedies)], 5, lambda *_: "")
    assert decision.numbers["factor"] == 0.001


def test_the_alert_advises_the_factor_of_the_learning_rate_within_limits():
    def factor(after: float) -> float:
        remedy = Remedy("lower_lr", {"from": 1.0, "to": after}, "")
        decisions = Decisions(Policy({"critical": "lower_lr"}))
        (decision,) = decisions.decide([alert(remedies=(remedy,))], 5, lambda *_: "")
        return decision.numbers["factor"]

    assert (factor(0.3), factor(0.001), factor(2.0)) == (0.3, 0.1, 0.5)


def test_a_policy_comes_from_toml_and_is_stored_with_its_run(tmp_path):
    (tmp_path / "own.toml").write_text(
        '[policy.rules]\nloss-spike = ["snapshot", "lower_lr"]\n[policy.lower_lr]\ntimes = 1\ndry_run = true\n'
    )
    config = forewarn.Config.load(tmp_path / "own.toml")
    assert config.policy.actions == {"snapshot", "lower_lr"}
    assert config.policy.is_dry("lower_lr")
    assert config.policy.lower_lr.times == 1
    (tmp_path / "preset.toml").write_text('policy = "autopilot"\n')
    stored = forewarn.Config.load(tmp_path / "preset.toml").to_dict()
    assert forewarn.Config.from_stored(stored).policy.to_dict() == PRESETS["autopilot"].to_dict()


def test_settings_of_an_action_that_nothing_takes_are_an_error():
    with pytest.raises(ValueError, match="sets roll_back, but no rule takes it; say when"):
        Policy.of({"roll_back": {"every": 5}}).checked()
    Policy.of({"rules": {"critical": "stop"}, "roll_back": {"every": 5}}).checked()
    Policy.of({"dry_run": True}).checked()


def test_every_preset_names_rules_that_exist():
    for policy in PRESETS.values():
        policy.checked()
