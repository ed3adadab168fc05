"""Rules about epochs: three textbook runs are told apart, and a gap by itself is left alone."""

import numpy as np
import pytest

from forewarn.types import AlertState, RunInfo, Severity
from tests.judge.rules.runs import Run

TEXTBOOK = {
    "lr too high late": [(3.2, 3.5), (2.1, 2.8), (2.0, 2.7), (1.98, 2.68)],
    "model too small": [(4.5, 4.6), (4.2, 4.4), (4.0, 4.2), (3.9, 4.1)],
    "overfitting": [(3.5, 3.6), (2.1, 2.8), (1.2, 2.6), (0.8, 2.7)],
}
KNOWN = RunInfo(
    num_parameters=1000,
    groups=({"lr": 3e-4, "weight_decay": 0.01},),
    hyperparameters={"dropout": 0.0, "width": 64, "depth": 4, "epochs": 4},
)


def judged(losses, *codes, lr=3e-4, per_epoch=10, info=KNOWN, level=()):
    """Epochs of ten steps: their losses at the last one, the lr at each, and levels of the loss at the first ones."""
    run = Run(*codes, info=info)
    rates = np.broadcast_to(lr, (len(losses) * per_epoch,))
    for number, (train, validation) in enumerate(losses, 1):
        for _ in range(per_epoch - 1):
            readings = {"train/lr": {"0": rates[run.at]}}
            run.feed(readings | ({"train/loss_level": level[run.at]} if run.at < len(level) else {}))
        readings = {"evaluation/epoch": number, "evaluation/train_loss": train, "train/lr": {"0": rates[run.at]}}
        run.feed(readings if validation is None else {**readings, "eval/loss": validation})
    return run


@pytest.mark.parametrize(
    ("name", "code", "severity", "remedies"),
    [
        ("lr too high late", "E102", Severity.WARNING,
         ["lower_lr 0.0003 → 0.0001", "decay_lr 0.0003 → 3e-5 shape cosine",
          "reduce_on_plateau factor 0.3 patience 2 step 39"]),
        ("model too small", "E105", Severity.INFO, ["widen 64 → 128", "deepen 4 → 6", "train_longer 4 → 8 in epochs"]),
        ("overfitting", "E101", Severity.WARNING,
         ["raise_dropout 0 → 0.1", "raise_weight_decay 0.01 → 0.1", "stop_early best_step 29 best_loss 2.6",
          "add_data factor 2", "smooth_labels to 0.1", "shrink 64 → 32"]),
    ],
)  # fmt: skip
def test_the_textbook_runs_are_told_apart_each_with_its_own_remedies(name, code, severity, remedies):
    run = judged(TEXTBOOK[name])
    alert = run.ledger.firing[0]
    assert (alert.code, alert.severity) == (code, severity)
    assert [str(remedy) for remedy in alert.remedies][: len(remedies)] == remedies
    assert run.codes - {"E109"} == {code}


def test_the_gap_of_the_overfitting_run_is_237_percent():
    for alert in judged(TEXTBOOK["overfitting"], "E101", "E109").ledger.firing:
        assert alert.finding.value == pytest.approx((2.7 - 0.8) / 0.8)


def test_a_gap_alone_is_information_from_the_first_epoch_on_and_gone_with_the_gap():
    run = judged([(2.0, 2.8), (1.5, 2.0), (1.4, 1.5)], "E101", "E109")
    (alert,) = run.ledger.alerts
    assert (alert.code, alert.severity, alert.since, alert.state) == ("E109", Severity.INFO, 9, AlertState.RESOLVED)
    assert {"smooth_labels", "shrink"} <= {remedy.action for remedy in alert.remedies}


def test_a_schedule_is_not_told_to_wait_for_plateaus():
    lr = np.linspace(3e-4, 2e-4, 40)
    (alert,) = judged([(3.0, 3.0), (2.0, 2.0), (1.99, 2.01), (1.98, 2.0)], "E103", lr=lr).ledger.firing
    assert "reduce_on_plateau" not in {remedy.action for remedy in alert.remedies}


def test_an_open_alert_speaks_of_the_newest_epoch_and_its_numbers():
    run = judged(TEXTBOOK["overfitting"], "E101")
    run.feed({"train/weight_decay": {"0": 0.1}})
    assert run.feed({"evaluation/epoch": 5, "evaluation/train_loss": 0.6, "eval/loss": 2.8}) == ()
    (alert,) = run.ledger.firing
    assert "raise_weight_decay 0.1 → 0.2" in map(str, alert.remedies)
    assert "validation loss 2.8" in alert.numbers


quiet = {
    "a large gap while both improve": [(2.0, 4.0), (1.5, 3.5), (1.2, 3.2), (1.0, 3.0)],
    "a steady run": [(4.0, 4.1), (3.0, 3.2), (2.5, 2.8), (2.2, 2.55), (2.0, 2.4)],
    "a gap of a solved task": [(1.5, 1.0), (0.2, 0.1), (0.01, 0.02), (0.001, 0.021), (0.0001, 0.022)],
    "dropout: training above validation": [(4.0, 3.6), (3.2, 3.0), (2.8, 2.6), (2.6, 2.45)],
    "epochs that are not finite": [(4.0, 4.1), (np.nan, 3.2), (2.5, np.inf), (2.2, 2.55)],
}


@pytest.mark.parametrize("name", quiet)
def test_no_warning_is_given_of(name):
    assert judged(quiet[name]).loud() == []


def test_a_stall_at_the_decayed_end_of_a_schedule_is_no_slow_improvement():
    lr = 3e-4 * (0.55 + 0.45 * np.cos(np.pi * np.arange(40) / 40))
    assert judged(TEXTBOOK["lr too high late"], lr=lr).loud() == []


def test_a_plateau_is_a_warning_at_a_high_lr_and_information_at_a_low_one():
    flat = [(3.0, 3.0), (2.0, 2.0), (1.99, 2.01), (1.98, 2.0)]
    (alert,) = judged(flat, "E103").ledger.firing
    assert alert.severity is Severity.WARNING
    assert alert.finding.value == pytest.approx(0.005, rel=1e-3)
    (alert,) = judged(flat, "E103", lr=[*[3e-4] * 20, *[3e-5] * 20]).ledger.firing
    assert alert.severity is Severity.INFO


def test_ten_thousand_steps_without_a_new_best_are_a_plateau_without_any_epoch():
    run = Run("E103")
    for step, loss in ((0, 3.0), (1000, 2.0), (6000, 2.2), (10_999, 2.1)):
        run.feed({"eval/loss": loss}, step)
    assert run.ledger.alerts == ()
    run.feed({"eval/loss": 2.1}, 11_000)
    (alert,) = run.ledger.firing
    assert (alert.finding.value, alert.finding.bound) == (10_000, 10_000)


def test_one_evaluation_above_the_best_is_information_and_two_are_a_warning():
    run = Run("E104").series("eval/loss", [3.0, 2.0, 2.3])
    assert run.ledger.firing[0].severity is Severity.INFO
    run.feed({"eval/loss": 2.3})
    assert run.ledger.firing[0].severity is Severity.WARNING
    assert Run("E104").series("eval/loss", [3.0, 2.0, 2.19, 2.19]).ledger.alerts == ()


def test_near_zero_is_judged_by_where_the_training_loss_came_from():
    rising = [0.05, 0.015, 0.03, 0.036]
    assert Run("E104").series("eval/loss", rising).loud()
    run = Run("E104")
    run.feed({"train/loss_level": 1.1})
    assert run.series("eval/loss", rising).ledger.alerts == ()


def test_an_alert_about_epochs_is_resolved_by_an_epoch_without_it():
    run = judged([*TEXTBOOK["overfitting"], (0.6, 2.3)], "E101")
    assert run.ledger.firing == ()
    assert len(run.ledger.alerts) == 1


EPOCHS = [(4.0, 4.1), (3.0, 3.2), (2.5, 2.8), (2.2, 2.55)]
FALLING = 1e-3 * np.linspace(1, 0.1, 40)


@pytest.mark.parametrize(
    ("declared", "lr", "remedy"),
    [
        ({"epochs": 4, "total_steps": 400}, 1e-3, "plan_steps 400 → 40"),
        ({"epochs": 8}, [*[1e-3] * 20, *[1e-6] * 20], "plan_steps 20 → 80"),
        ({"total_steps": 25}, 1e-3, "plan_steps 25 → 40"),
        ({"epochs": 4, "total_steps": 40}, 1e-3 * np.linspace(1, 0.8, 40), "plan_steps to 40"),
    ],
    ids=["another number of steps", "ended at a quarter", "goes on after the plan", "made for a longer run"],
)
def test_a_schedule_that_does_not_end_with_the_training(declared, lr, remedy):
    run = judged(EPOCHS, "E108", lr=lr, info=RunInfo(hyperparameters=declared))
    (alert,) = run.ledger.firing
    assert str(alert.remedies[0]) == remedy


@pytest.mark.parametrize(
    ("declared", "lr"),
    [
        ({}, FALLING), ({"epochs": 4, "total_steps": 40}, FALLING), ({"epochs": 4, "total_steps": 44}, 1e-3),
        ({"epochs": 100}, 1e-5 * np.arange(1, 41)), ({"epochs": True, "total_steps": "many"}, FALLING),
    ],
    ids=["nothing declared", "it ends with the run", "about right", "a long warm-up", "not numbers"],
)  # fmt: skip
def test_a_schedule_is_left_alone_where(declared, lr):
    assert judged(EPOCHS, "E108", lr=lr, info=RunInfo(hyperparameters=declared)).ledger.alerts == ()
