"""Rules about what does not move: a frozen weight is named with its cause, one that is meant to be is not."""

import pytest
import torch
from torch import nn

from forewarn.types import FrozenCause, RunInfo, Severity
from tests.judge.rules.runs import Run, info
from tests.real_runs import Breakable

KNOWN = info("a.weight", "b.weight", "c.weight", vectors=["a.bias"])


def test_a_frozen_weight_names_its_cause_and_what_to_do_about_it():
    wanted = {
        FrozenCause.NOT_IN_OPTIMIZER: "add_to_optimizer",
        FrozenCause.REQUIRES_GRAD_OFF: "set_requires_grad",
        FrozenCause.NO_GRADIENT: "check_graph",
        FrozenCause.ZERO_GRADIENT: "inspect_layer",
        FrozenCause.ZERO_LR: "raise_lr",
        FrozenCause.OPTIMIZER_NOT_STEPPED: "call_optimizer_step",
        FrozenCause.STEP_SKIPPED: "lower_loss_scale",
        FrozenCause.ROUNDED_AWAY: "keep_in_float32",
    }
    assert set(wanted) == set(FrozenCause) - {FrozenCause.MOVING, FrozenCause.ON_PURPOSE}
    for cause, action in wanted.items():
        run = Run("U101", info=RunInfo(groups=({"lr": 1e-3},)))
        lr = 0.0 if cause is FrozenCause.ZERO_LR else 1e-3
        run.feed({"train/lr": {"0": lr}, "update/frozen_cause": {"a.weight": cause}, "update/ratio": {"a.weight": 0.0}})
        (alert,) = run.ledger.firing
        assert alert.finding.evidence["cause"] == cause.name.lower()
        assert alert.finding.value == 0.0
        assert alert.remedies[0].action == action
        assert alert.severity is (Severity.INFO if cause is FrozenCause.STEP_SKIPPED else Severity.WARNING)


@pytest.mark.parametrize(("left", "severity"), [(1e-14, Severity.INFO), (0.0, Severity.INFO), (0.1, Severity.WARNING)])
@pytest.mark.parametrize("cause", [FrozenCause.ROUNDED_AWAY, FrozenCause.ZERO_GRADIENT, FrozenCause.MOVING])
def test_on_a_solved_task_weights_that_stand_still_are_information(left, severity, cause):
    run = Run("U101", "U103", info=KNOWN)
    ratio = 1e-9 if cause is FrozenCause.MOVING else 0.0
    for step in range(30):
        readings = {"train/loss": 2.0 if step < 20 else left, "train/lr": {"0": 1e-3}}
        if step >= 20:
            readings |= {"update/frozen_cause": {"a.weight": cause}, "update/ratio": {"a.weight": ratio}}
        run.feed(readings)
    (alert,) = run.ledger.alerts
    assert (alert.code, alert.severity) == ("U103" if ratio else "U101", severity)


def test_the_levels_remember_how_high_the_loss_was_and_other_causes_stay_warnings():
    for cause, severity in ((FrozenCause.ROUNDED_AWAY, Severity.INFO), (FrozenCause.NO_GRADIENT, Severity.WARNING)):
        run = Run("U101")
        run.feed({"train/loss": 1e-14, "train/loss_level": 2.0, "update/frozen_cause": {"a.weight": cause}})
        assert run.ledger.alerts[0].severity is severity


def test_a_weight_that_stopped_says_when_it_last_moved():
    run = Run("U101", info=KNOWN)
    for step, ratio in ((0, 0.1), (100, 0.1), (200, 0.0), (300, 0.0), (400, 0.0)):
        cause = float(FrozenCause.ZERO_GRADIENT) if step == 400 else 0.0
        run.feed({"update/frozen_cause": {"a.weight": cause}, "update/ratio": {"a.weight": ratio}}, step)
    (alert,) = run.ledger.firing
    assert alert.finding.evidence["lasting_steps"] == 300


def test_what_moves_or_is_frozen_on_purpose_is_not_reported():
    run = Run("U101", "U106")
    for _ in range(10):
        run.feed({"update/frozen_cause": {"a.weight": FrozenCause.MOVING, "b.weight": FrozenCause.ON_PURPOSE}})
    assert run.ledger.alerts == ()


def test_a_parameter_outside_the_optimizer_is_the_reason_why_it_is_frozen():
    run = Run("U101", "U106")
    run.feed({"train/lr": {"0": 1e-3}, "update/frozen_cause": {"head.weight": FrozenCause.NOT_IN_OPTIMIZER}})
    assert [alert.code for alert in run.ledger.firing] == ["U106", "U101"]
    assert str(run.ledger.firing[0].remedies[0]) == "add_to_optimizer parameter head.weight lr 0.001"


def test_an_optimizer_that_never_steps_is_named_after_three_steps():
    run = Run("U105").series("update/optimizer_steps", [0, 0, 0])
    assert run.ledger.firing[0].finding.evidence["lasting_steps"] == 3


def test_a_monitor_that_is_stepped_for_every_batch_of_an_accumulation_learns_the_gap():
    run = Run("U105").series("update/optimizer_steps", [0, 0, 0, 0, 0, 0, 0, 1] * 20)
    assert [alert.since for alert in run.ledger.alerts] == [2]
    assert run.ledger.firing == ()


def test_a_scaler_may_skip_some_steps_but_not_all():
    def skipping(steps):
        run = Run("U105")
        for _ in range(steps):
            run.feed({"update/optimizer_steps": 0.0, "update/skipped": 1.0, "train/loss_scale": 1.0})
        return run

    assert skipping(19).ledger.alerts == ()
    assert skipping(20).ledger.firing[0].finding.evidence["overflows"] == 20


def test_a_forgotten_step_is_seen_with_a_scaler_too():
    run = Run("U105")
    for skipped in (1.0, 0.0, 0.0, 0.0):
        run.feed({"update/optimizer_steps": 0.0, "update/skipped": skipped})
    assert run.ledger.firing


@pytest.mark.parametrize(
    ("head", "do"),
    [
        ({"lr": 0.0}, "Set the learning rate of group 1 to 0.001, as in the other groups"),
        ({"lr": 0.0, "initial_lr": 0.02}, "Set the learning rate of group 1 back to 0.02"),
    ],
)
def test_a_group_without_a_learning_rate_is_not_told_the_rate_of_another(head, do, watch):
    torch.manual_seed(0)
    model = nn.ModuleDict({"body": nn.Linear(4, 4), "head": nn.Linear(4, 2)})
    optimizers = [
        torch.optim.AdamW(model["body"].parameters(), lr=1e-3),
        torch.optim.SGD([{"params": model["head"].parameters(), **head}], lr=0.1),
    ]
    monitor = watch(model, optimizers)
    for _ in range(5):
        loss = model["head"](model["body"](torch.ones(2, 4))).square().mean()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        monitor.step(loss)
    alerts = [alert for alert in monitor.firing if alert.code == "U101"]
    assert {alert.scope for alert in alerts} == {"head.weight", "head.bias"}
    assert {alert.remedies[0].do for alert in alerts} == {do}


def test_a_bias_that_cancels_in_the_loss_is_information():
    run = Run("U101", info=KNOWN)
    zero = {"a.weight": FrozenCause.MOVING, "a.bias": FrozenCause.ZERO_GRADIENT}
    for _ in range(4):
        run.feed({"update/frozen_cause": zero, "update/ratio": {"a.weight": 0.01, "a.bias": 0.0}})
    assert [(alert.scope, alert.severity) for alert in run.ledger.alerts] == [("a.bias", Severity.INFO)]


@pytest.mark.parametrize("which", [[2], range(8)])
def test_a_layer_whose_gradients_the_loop_removes_is_frozen_on_purpose_unless_all_are_removed(which, tmp_path):
    it = Breakable(tmp_path / "run")
    it.clip, parameters = None, list(it.model.parameters())
    before = it.optimizer.step

    def step_without_some(*arguments):
        for index in which:
            parameters[index].grad = None
        return before(*arguments)

    it.optimizer.step = step_without_some
    codes = {alert.code for alert in it.train(60).alerts if alert.severity >= Severity.WARNING}
    assert codes == set() if list(which) == [2] else codes


def all_but_the_last_layer_frozen(run):
    it = Breakable(run)
    it.model.requires_grad_(False)
    it.linears()[-1].requires_grad_(True)
    return it.train(60)


FAULTS = {"U114": all_but_the_last_layer_frozen}
