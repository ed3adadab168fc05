"""A loss that has left its level for good: a step up, a start left far behind, a fall without a floor."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import forewarn
from forewarn.types import RunInfo, Severity
from tests.judge.rules.runs import Run
from tests.real_runs import WHEN, Breakable


def losses_fed(code, losses, info=None, separate=False, others=None):
    """A run with these losses and the levels that the monitor records: the first loss, then medians of 32."""
    run = Run(code, info=info or RunInfo())
    losses = np.asarray(losses, np.float32)
    for step, loss in enumerate(losses):
        readings = {"train/loss": loss, **(others or {})}
        if step == 0 or step % 32 == 31:
            readings["train/loss_level"] = loss if step == 0 else float(np.median(losses[step - 31 : step + 1]))
        if separate and step < 10:
            readings["update/separate_losses"] = 1.0
        run.feed(readings)
    return run


def learned(steps=160, start=2.4, end=0.9):
    rng = np.random.default_rng(0)
    return end + (start - end) * np.exp(-np.arange(steps) / 40) + 0.05 * rng.standard_normal(steps)


def test_a_lasting_step_up_is_named_with_the_step_at_which_it_came():
    run = losses_fed("L107", np.append(learned(150), np.full(150, 2.3)))
    (alert,) = run.ledger.alerts
    assert alert.severity is Severity.CRITICAL
    assert alert.finding.evidence["rose_at"] == 150
    assert alert.remedies[0].do == "Check what changed in the data around step 150"


def test_a_step_up_on_a_full_batch_is_blamed_on_the_steps_and_not_on_the_data():
    run = Run("L107")
    losses = np.append(learned(150), np.full(60, 2.3)).astype(np.float32)
    for step, loss in enumerate(losses):
        readings = {"train/loss": loss, "train/lr": {"0": 1e-3}, "batch/repeated": 1.0}
        if step == 0 or step % 32 == 31:
            readings["train/loss_level"] = loss if step == 0 else float(np.median(losses[step - 31 : step + 1]))
        run.feed(readings)
    (alert,) = run.ledger.alerts
    assert "too large" in alert.cause
    assert alert.remedies[0].action == "lower_lr"


@pytest.mark.parametrize(("low", "codes"), [(0.1, {"L107"}), (2.0, {"L108"})])
def test_what_had_learned_and_rises_above_its_start_has_shifted_and_is_not_above_it_from_the_start(low, codes):
    losses = np.concatenate([np.linspace(2.4, low, 100), np.full(28, low), np.full(150, 9.0)])
    found = {code for code in ("L107", "L108") if losses_fed(code, losses).loud()}
    assert found >= codes
    assert ("L108" in found) == ("L108" in codes)


@pytest.mark.parametrize("shape", ["step", "ramp", "saturating"])
def test_the_shape_of_the_rise_does_not_matter(shape):
    time = np.arange(150)
    rise = {"step": np.ones(150), "ramp": np.minimum(1, time / 90), "saturating": 1 - np.exp(-time / 20)}[shape]
    assert losses_fed("L107", np.append(learned(150), 0.9 + 1.2 * rise)).loud()


def test_a_leap_is_told_after_sixteen_losses_and_a_slow_rise_after_a_level():
    (alert,) = losses_fed("L107", np.append(learned(150), np.full(150, 2.3))).ledger.alerts
    assert alert.fired == 165
    (alert,) = losses_fed("L107", np.append(learned(150), np.linspace(0.9, 2.3, 150))).ledger.alerts
    assert alert.fired % 32 == 31


def test_a_leap_counts_by_its_level_if_the_first_losses_were_far_above_chance():
    early = np.append(np.linspace(29, 5, 32), learned(200, 5, 2.5))
    assert [alert.severity for alert in losses_fed("L107", np.append(early, np.full(60, 3.5))).ledger.alerts] == [
        Severity.WARNING
    ]
    assert losses_fed("L107", np.append(early, np.full(60, 2.9))).ledger.alerts == ()


def test_a_bad_dozen_of_steps_is_no_shift():
    losses = np.concatenate([learned(150), np.full(12, 4.0), np.full(120, 0.9)])
    assert losses_fed("L107", losses).ledger.alerts == ()


def test_a_solved_task_may_lose_a_factor_of_a_hundred():
    losses = np.concatenate([learned(150, end=0.0), np.full(100, 1e-5), np.full(100, 1e-3)])
    assert losses_fed("L107", np.abs(losses)).ledger.alerts == ()


@pytest.mark.parametrize("told", [{"info": RunInfo(objective="return")}, {"separate": True}])
def test_a_loss_that_is_no_objective_may_rise(told):
    run = losses_fed("L107", np.append(learned(150), np.full(150, 2.3)), **told)
    assert [alert.severity for alert in run.ledger.alerts] == [Severity.INFO]


def test_a_sudden_rise_is_put_down_to_the_data_only_if_the_loss_is_the_objective():
    rise, rates = np.append(learned(150), np.full(150, 2.3)), {"train/lr": {"0": 1e-3}}
    causes = {
        separate: losses_fed("L107", rise, None, separate, rates).ledger.alerts[0].cause for separate in (False, True)
    }
    assert "most likely the data" in causes[False]
    assert causes[True] == "it rose around step 150"


def test_declaring_the_loss_as_the_objective_outranks_what_the_readings_tell():
    rise = np.append(learned(150), np.full(150, 2.3))
    assert losses_fed("L107", rise, info=RunInfo(objective="loss"), separate=True).loud()


def test_far_above_the_start_needs_forty_steps_at_most():
    losses = 1.6 * np.exp(np.arange(40) * np.log(60 / 1.6) / 39)
    (alert,) = losses_fed("L108", losses).ledger.alerts
    assert alert.fired < 40
    assert alert.severity is Severity.CRITICAL


def test_one_side_of_a_game_may_be_a_few_times_its_start_but_not_many():
    game = np.append(np.full(20, 1.6), np.full(40, 8.0))
    assert losses_fed("L108", game, separate=True).ledger.alerts == ()
    assert losses_fed("L108", game * np.append(np.ones(20), np.full(40, 5.0)), separate=True).loud()


def test_a_likelihood_that_slows_down_has_a_floor():
    steps = np.arange(400)
    assert losses_fed("L109", 3 - 12 * (1 - np.exp(-steps / 60))).ledger.alerts == ()
    assert losses_fed("L109", 3 - 1e-3 * steps**2).loud()


def test_a_loss_that_fell_without_limit_and_then_stays_there_is_still_lost():
    steps = np.arange(640)
    run = losses_fed("L109", np.maximum(3 - 1e-3 * steps**2, -60))
    assert [alert.state.name for alert in run.ledger.alerts] == ["FIRING"]


def inputs_of_other_samples(run):
    it = Breakable(run)
    it.change_batch = lambda step, inputs: inputs.roll(1, 0) if step >= WHEN else inputs
    return it.train(260)


def ascent_of_a_regression(run):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, maximize=True)
    with forewarn.watch(model, optimizer, run, every=20) as monitor:
        for _ in range(200):
            inputs = torch.randn(64, 16)
            loss = functional.mse_loss(model(inputs), inputs[:, :1])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            monitor.step(loss)
    return monitor


def divergence_subtracted(run):
    torch.manual_seed(0)
    model = nn.Linear(16, 8)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    inputs = torch.randn(256, 16)
    with forewarn.watch(model, optimizer, run, every=20) as monitor:
        for _ in range(320):
            mean, log_variance = model(inputs).chunk(2, 1)
            divergence = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum(1).mean()
            loss = functional.mse_loss(mean.sum(1), inputs[:, 0]) - 0.01 * divergence
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            monitor.step(loss)
    return monitor


FAULTS = {"L107": inputs_of_other_samples, "L108": ascent_of_a_regression, "L109": divergence_subtracted}
