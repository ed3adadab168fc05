"""Rules about the loss: what is wrong is named, noise and plans are left alone."""

import numpy as np
import pytest

from forewarn.types import AlertState, RunInfo, Severity
from tests.judge.rules.runs import Run

STEPS = np.arange(2000)


def noise(scale, seed=0, size=2000):
    return np.exp(scale * np.random.default_rng(seed).normal(size=size))


def test_a_loss_that_is_no_number_is_critical_at_once():
    run = Run("L101").series("train/loss", [2.0] * 10 + [np.nan])
    (alert,) = run.ledger.firing
    assert alert.severity is Severity.CRITICAL
    assert alert.finding.evidence["last_finite"] == 2.0
    assert [str(remedy) for remedy in alert.remedies][:2] == ["skip_batch step 10", "roll_back before_step 10"]


def test_a_single_spike_is_information_and_a_lasting_one_a_warning():
    run = Run("L102").series("train/loss", 2 * noise(0.02, size=100))
    (alert,) = run.feed({"train/loss": 6.0})
    assert alert.severity is Severity.INFO
    assert run.feed({"train/loss": 6.0}) == ()
    (alert,) = run.feed({"train/loss": 6.0})
    assert alert.severity is Severity.WARNING
    assert alert.finding.evidence["lasting_steps"] == 3


@pytest.mark.parametrize(("height", "severity"), [(30.0, Severity.WARNING), (300.0, Severity.CRITICAL)])
def test_a_tall_spike_is_serious_at_once(height, severity):
    run = Run("L102").series("train/loss", 2 * noise(0.02, size=100))
    (alert,) = run.feed({"train/loss": height})
    assert alert.severity is severity


def test_a_spike_that_does_not_come_back_is_critical_after_twenty_steps():
    run = Run("L102").series("train/loss", [*(2 * noise(0.02, size=100)), *[6.0] * 20])
    assert run.ledger.firing[0].severity is Severity.WARNING
    (alert,) = run.feed({"train/loss": 6.0})
    assert alert.severity is Severity.CRITICAL


def test_a_new_level_is_reported_once_and_then_accepted():
    run = Run("L102").series("train/loss", [*(2 * noise(0.02, size=100)), *(6 * noise(0.02, 1, size=300))])
    (alert,) = run.ledger.alerts
    assert alert.state is AlertState.RESOLVED
    assert alert.last == 100 + 32 - 1


quiet_losses = {
    "noise": 2 * noise(0.05),
    "much noise": 2 * noise(0.3),
    "noise of a solved task": 0.01 * noise(1.0),
    "decay": (8 * np.exp(-STEPS / 300) + 1.5) * noise(0.03),
    "cosine": (2 + np.cos(np.pi * STEPS / 2000)) * noise(0.03),
    "short spike": np.interp(STEPS, [0, 1000, 1005, 1025, 2000], [2, 2, 8, 2, 2]) * noise(0.05),
    "slow return": (2 + 6 * np.exp(-np.maximum(0, STEPS - 1000) / 60) * (STEPS >= 1000)) * noise(0.05),
    "level shift": np.where(STEPS < 1000, 2.0, 4.0) * noise(0.05),
    "level shift in noise": np.where(STEPS < 1000, 2.0, 4.0) * noise(0.2),
    "small rise": np.interp(STEPS, [0, 1000, 1200, 2000], [2, 2, 2.6, 2.6]) * noise(0.05),
    "through zero": np.sin(STEPS / 100) * noise(0.05),
    "negative": -2 + 0.5 * STEPS / 2000 + 0.01 * noise(0.5),
}


@pytest.mark.parametrize("name", quiet_losses)
def test_no_divergence_is_seen_in(name):
    assert Run("L103").series("train/loss", quiet_losses[name]).ledger.alerts == ()


@pytest.mark.parametrize("name", ["noise", "much noise", "noise of a solved task", "decay", "cosine", "small rise"])
def test_no_loud_spike_is_seen_in(name):
    assert Run("L102").series("train/loss", quiet_losses[name]).loud() == []


diverging_losses = {
    "exponential": 2 * np.exp(np.maximum(0, STEPS - 1000) * 0.01) * noise(0.05),
    "linear": np.interp(STEPS, [0, 1000, 1400, 2000], [2, 2, 4, 7]) * noise(0.05),
    "in noise": np.interp(STEPS, [0, 1000, 1200, 2000], [2, 2, 6, 20]) * noise(0.1),
}


@pytest.mark.parametrize("name", diverging_losses)
def test_a_divergence_is_seen_before_the_loss_has_tripled(name):
    run = Run("L103")
    changed = [alert for value in diverging_losses[name] for alert in run.feed({"train/loss": value})]
    first, *later = changed
    assert 1000 < first.fired < 1000 + 400
    assert np.median(diverging_losses[name][first.fired - 16 : first.fired]) < 6.5
    assert first.finding.evidence["best"] == pytest.approx(2.0, rel=0.1)
    assert [alert.severity for alert in (first, *later)][-1] is Severity.CRITICAL
    assert len(run.ledger.alerts) == 1


def test_a_loss_that_rises_from_the_start_has_no_level_to_leave():
    assert Run("L103").series("train/loss", np.linspace(1, 3, 120)).ledger.alerts == ()


def restarts(peak_loss, period=400):
    """A schedule that restarts, with a loss that follows the lr: what it wins at a low lr it loses at a high one."""
    lr = 1e-3 * 0.5 * (1 + np.cos(np.pi * (STEPS % period) / period))
    lag = np.convolve(np.concatenate([np.full(60, lr[0]), lr]), np.ones(60) / 60, "valid")[: len(STEPS)]
    return lr, (0.2 + (peak_loss - 0.2) * lag / 1e-3) * noise(0.05)


@pytest.mark.parametrize(
    "known", [RunInfo(), RunInfo(groups=({"lr": 1e-3, "initial_lr": 1e-3},))], ids=["seen", "declared"]
)
def test_a_restart_of_the_schedule_is_no_divergence(known):
    lr, loss = restarts(peak_loss=0.8)
    run = Run("L103", info=known)
    for rate, value in zip(lr, loss, strict=True):
        run.feed({"train/loss": value, "train/lr": {"0": rate}})
    assert run.ledger.alerts == ()


def test_without_the_lr_the_same_rise_is_one():
    assert Run("L103").series("train/loss", restarts(peak_loss=0.8)[1]).ledger.alerts


def test_a_warm_up_into_divergence_is_seen_although_the_lr_rises_by_plan():
    lr = np.minimum(1.0, (STEPS + 1) / 1500) * 1e-2
    loss = np.where(STEPS < 700, 8 * np.exp(-STEPS / 200) + 2, 2.2 * np.exp((STEPS - 700) * 0.004)) * noise(0.05)
    run = Run("L103", info=RunInfo(groups=({"lr": 1e-2, "initial_lr": 1e-2},)))
    for rate, value in zip(lr, loss, strict=True):
        run.feed({"train/loss": value, "train/lr": {"0": rate}})
    assert 700 < run.ledger.alerts[0].fired < 1100


def test_a_solved_task_may_jump_by_large_factors():
    falling = 1.1 * np.exp(-STEPS[:300] / 40) + 0.001
    run = Run("L102").series("train/loss", falling * noise(0.1, size=300))
    (alert,) = run.feed({"train/loss": 0.045})
    assert alert.severity is Severity.INFO


def test_a_tall_spike_is_seen_while_the_loss_falls_fast():
    run = Run("L102").series("train/loss", 5 * np.exp(-STEPS[:60] / 12) * noise(0.3, size=60))
    (alert,) = run.feed({"train/loss": 400.0})
    assert alert.severity is Severity.CRITICAL


_SCATTER = np.random.default_rng(0).normal(size=len(STEPS))

negative_losses = {
    "likelihood that falls": -4 + 6 * np.exp(-STEPS / 300) + 0.05 * _SCATTER,
    "likelihood that falls fast": -4 + 60 * np.exp(-STEPS / 10) + 0.05 * _SCATTER,
    "steadily without noise": 2 - 0.003 * STEPS,
    "standing still": np.full(len(STEPS), -2.0),
    "noise": -2 + 0.2 * _SCATTER,
    "policy loss around zero": 0.1 * _SCATTER,
    "noise with heavy tails": -2 + 0.05 * np.random.default_rng(0).standard_t(4, len(STEPS)),
    "cosine": -2 + np.cos(np.pi * STEPS / 2000) + 0.05 * _SCATTER,
    "slow rise": -2 + 0.5 * STEPS / 2000 + 0.05 * _SCATTER,
    "through zero": quiet_losses["through zero"],
}


@pytest.mark.parametrize("name", negative_losses)
def test_no_loud_spike_is_seen_in_a_negative(name):
    run = Run("L102").series("train/loss", negative_losses[name])
    assert run.loud() == []
    if "tails" not in name:
        assert run.ledger.alerts == ()


def test_a_negative_loss_spikes_by_its_spread_and_by_what_it_had_gained():
    losses = negative_losses["likelihood that falls"][:400].astype(np.float32)
    run = Run("L102").series("train/loss", losses)
    (alert,) = run.feed({"train/loss": -1.0})
    assert alert.severity is Severity.INFO
    recent = losses[-64:]
    level = np.median(recent)
    assert alert.finding.evidence["level"] == pytest.approx(level)
    reach = max(6 * 1.4826 * np.median(np.abs(recent - level)), 0.1 * (losses.max() - level))
    assert alert.finding.bound == pytest.approx(level + reach)
    run.feed({"train/loss": -1.0})
    (alert,) = run.feed({"train/loss": -1.0})
    assert (alert.severity, alert.finding.evidence["lasting_steps"]) == (Severity.WARNING, 3)
    for _ in range(17):
        assert run.feed({"train/loss": -1.0}) == ()
    (alert,) = run.feed({"train/loss": -1.0})
    assert alert.severity is Severity.CRITICAL
    for _ in range(200):
        run.feed({"train/loss": -1.0})
    (alert,) = run.ledger.alerts
    assert alert.state is AlertState.RESOLVED, "the new level is accepted"


@pytest.mark.parametrize(
    ("height", "severity"), [(3.0, Severity.INFO), (80.0, Severity.WARNING), (800.0, Severity.CRITICAL)]
)
def test_a_negative_loss_may_spike_far_above_all_that_was_gained(height, severity):
    run = Run("L102").series("train/loss", 2 - 0.01 * STEPS[:400])
    (alert,) = run.feed({"train/loss": height})
    assert alert.severity is severity


@pytest.mark.parametrize(
    "losses",
    [[-1.0] * 140 + [-0.9999], [-2.0] * 140 + [-1.984], [0.0] * 140 + [-1e-6, 1e-9], [-2.0] * 140 + [-1.9] * 2],
    ids=["a tiny rise", "one step of bfloat16", "around zero", "two small rises"],
)
def test_a_small_rise_of_a_loss_that_stood_still_is_information_at_most(losses):
    assert Run("L102").series("train/loss", losses).loud() == []


@pytest.mark.parametrize("every", [1, 10])
def test_a_loss_that_is_logged_now_and_then_is_judged_in_steps(every):
    run = Run("L102")
    for reading, loss in enumerate([2.0 + 0.001 * step for step in range(150)] + [4.0, 4.0]):
        run.feed({"train/loss": loss}, every * reading)
    (alert,) = run.ledger.alerts
    assert alert.finding.evidence["lasting_steps"] == 1 + every
    assert alert.severity is (Severity.WARNING if every > 1 else Severity.INFO)


@pytest.mark.parametrize(
    ("losses", "action"),
    [([2.0, 2.0, np.nan], "skip_batch"), ([2.0, 2.0, np.inf], "find_operation"), ([np.nan], "find_operation")],
)
def test_a_loss_that_is_infinite_or_was_never_finite_is_not_blamed_on_a_batch(losses, action):
    (alert,) = Run("L101").series("train/loss", losses).ledger.firing
    assert alert.remedies[0].action == action
