"""Where the loss is heading: on curves that are known, and on the held-out tails of real runs."""

from __future__ import annotations

import math

import numpy as np
import pytest

from forewarn.judge.forecast import LossCurve, forecast
from forewarn.types import AlertState, Severity
from tests.judge.test_diagnosis import alert
from tests.loss_curves import curves


def power_law(
    steps: int, floor: float = 1.5, drop: float = 6.0, exponent: float = 0.4, noise: float = 0.0
) -> LossCurve:
    rng = np.random.default_rng(0)
    at = np.arange(steps)
    return LossCurve.of(at, floor + drop * (at + 1.0) ** -exponent + noise * rng.standard_normal(steps))


def test_a_power_law_is_continued():
    told = forecast(power_law(2000), at=6000)
    assert told.loss == pytest.approx(1.5 + 6 * 6001**-0.4, rel=0.01)
    assert told.low < told.loss < told.high


def test_the_first_loss_stays_the_first_however_long_the_run():
    curve = power_law(5000)
    assert curve.first == 7.5
    assert curve.points[1][0] < 7
    resumed = LossCurve()
    resumed.load_state_dict(curve.state_dict())
    assert resumed.first == 7.5


def test_outliers_do_not_move_it():
    curve, spiky = LossCurve(), LossCurve()
    for step in range(1000):
        loss = 1.5 + 6 * (step + 1) ** -0.4
        curve.append(step, loss)
        spiky.append(step, 50.0 if step % 97 == 0 else loss)
    assert forecast(spiky, 2000).loss == pytest.approx(forecast(curve, 2000).loss, rel=0.02)


def test_a_target_is_met_within_its_interval_or_not_in_sight():
    curve = power_law(2000, noise=0.02)
    met = (6 / 0.2) ** (1 / 0.4)  # 1.5 + 6 · step^-0.4 = 1.7
    told = forecast(curve, target=1.7)
    assert told.target_soonest <= met <= told.target_latest
    assert told.target_step == pytest.approx(met, rel=0.2)
    assert forecast(curve, target=1.4).target_step == math.inf


def test_the_interval_holds_on_held_out_tails_of_real_runs():
    """Nominally nine in ten, over 12 runs of the example GPT, constant and cosine rates, cut at four places."""
    held, misses, unmoved = [], [], []
    for losses in curves().values():
        actual = float(np.median(losses[-50:]))
        for cut in (0.4, 0.5, 0.6, 0.7):
            seen = int(cut * len(losses))
            told = forecast(LossCurve.of(range(seen), losses[:seen].tolist()), at=len(losses) - 1)
            assert not told.declined
            held.append(told.low <= actual <= told.high)
            misses.append(abs(told.loss - actual))
            unmoved.append(abs(told.level - actual))
    assert np.mean(held) >= 0.9
    assert np.mean(misses) < 0.5 * np.mean(unmoved), "no better than the level that was last seen"


@pytest.mark.parametrize(
    ("curve", "at", "reason"),
    [
        (LossCurve(), None, "no loss"),
        (LossCurve.of(range(300), [math.nan] * 300), None, "no loss was recorded that is finite"),
        (power_law(100), None, "too few"),
        (power_law(1000), 5000, "more than 4 times"),
        (LossCurve.of(range(500), [2.0] * 500), None, "hardly fallen"),
        (LossCurve.of(range(500), np.linspace(1, 3, 500)), None, "hardly fallen"),
    ],
)
def test_it_says_too_early_rather_than_guess(curve, at, reason):
    told = forecast(curve, at)
    assert reason in told.declined
    assert math.isnan(told.loss)


def test_an_exponential_fall_ends_on_its_floor():
    random = np.random.default_rng(0)
    losses = [0.5 + 8 * math.exp(-step / 25) * random.chisquare(64) / 64 for step in range(400)]
    told = forecast(LossCurve.of(range(400), losses), at=1000)
    assert told.loss == pytest.approx(0.5, abs=0.02)
    assert 0.4 < told.low < 0.5 < told.high < 0.6


def test_one_step_ahead_the_interval_holds_the_present_level():
    for losses in curves().values():
        told = forecast(LossCurve.of(range(len(losses)), losses.tolist()), at=len(losses))
        recent = losses[-len(losses) // 20 :]
        assert told.low < told.level < told.high
        assert (
            told.high - told.low >= 2 * 1.64 * 1.48 * np.median(np.abs(recent - np.median(recent))) / len(recent) ** 0.5
        )


def test_a_loss_that_was_never_negative_is_not_expected_to_be():
    random = np.random.default_rng(0)
    losses = np.exp(-np.arange(400) / 60 + 0.8 * random.standard_normal(400))
    assert forecast(LossCurve.of(range(400), losses), at=1500).low >= 0
    shifted = forecast(LossCurve.of(range(400), losses - 1), at=1500)
    assert shifted.low < 0


@pytest.mark.parametrize("steps", [100, 2000])
def test_a_target_that_is_met_already_says_so(steps):
    told = forecast(power_law(steps), target=5.0)
    assert told.reached
    assert told.target_step == told.target_soonest == told.target_latest == told.now == steps - 1
    assert not forecast(power_law(steps), target=1.0).reached


def curve_of(shape: str, steps: int = 500) -> LossCurve:
    random = np.random.default_rng(1)
    at = np.arange(steps)
    losses = {
        "exponential to a floor": 0.0028 + 2.3 * np.exp(-at / 30) * random.chisquare(32, steps) / 32,
        "solved at once, noisy floor": np.maximum(0.0028, 2.3 * np.exp(-at / 5)) * random.lognormal(0, 0.5, steps),
        "noisy floor": 0.0028 * random.lognormal(0, 0.5, steps) + 2.3 * np.exp(-at / (steps / 12)),
        "power law": 1.5 + 6 * (at + 1.0) ** -0.4 + 0.03 * random.standard_normal(steps),
        "plateau": np.where(at < 0.3 * steps, 5 - 10 * at / steps, 2.0) + 0.03 * random.standard_normal(steps),
        "late drop": np.where(at < 0.8 * steps, 2.3, 0.3) + 0.03 * random.standard_normal(steps),
        "rising": 2 + 3 * np.exp(-at / 20) + 2 * np.maximum(0, at / steps - 0.6) + 0.03 * random.standard_normal(steps),
    }[shape]
    return LossCurve.of(range(steps), losses.tolist())


@pytest.mark.parametrize("steps", [250, 500, 3000])
@pytest.mark.parametrize(
    "shape",
    ["exponential to a floor", "solved at once, noisy floor", "noisy floor", "power law", "plateau", "late drop"],
)
def test_no_rise_is_predicted_without_evidence_for_one(shape, steps):
    for at in (steps + 1, 2 * steps, 4 * steps - 10):
        told = forecast(curve_of(shape, steps), at)
        assert not told.declined
        assert 0 <= told.low <= told.loss <= told.level
        assert told.loss <= told.high <= 5.1, "nor is the interval above all that was seen"


@pytest.mark.parametrize("steps", [250, 500, 3000])
def test_a_plateau_falls_no_faster_than_it_did_lately(steps):
    told = forecast(curve_of("plateau", steps), 3 * steps)
    assert told.loss == pytest.approx(2.0, abs=0.05)


@pytest.mark.parametrize("steps", [250, 500, 3000])
def test_a_solved_task_stays_solved(steps):
    told = forecast(curve_of("solved at once, noisy floor", steps))
    assert told.loss == pytest.approx(0.0028, rel=0.3)
    assert told.high < 0.01


def test_a_loss_that_rises_lately_gets_no_forecast():
    assert "rising over the last 25% of the run" in forecast(curve_of("rising")).declined


def test_open_warnings_are_named_and_a_critical_one_leaves_no_forecast():
    warning, note = alert(Severity.WARNING, AlertState.FIRING), alert(Severity.INFO, AlertState.FIRING)
    told = forecast(power_law(1000), alerts=[warning, warning, note])
    assert told.open_warnings == ("loss-spike",)
    assert math.isfinite(told.loss)
    for quiet in (note, alert(Severity.CRITICAL, AlertState.RESOLVED)):
        assert forecast(power_law(1000), alerts=[quiet]).open_warnings == ()
    told = forecast(power_law(1000), alerts=[alert(Severity.CRITICAL, AlertState.FIRING)])
    assert told.declined == "loss-spike is open and critical"
    assert math.isnan(told.loss)


def test_what_was_asked_for_wrongly_is_one_sentence():
    with pytest.raises(ValueError, match="target must be a loss to wait for, not nan"):
        forecast(power_law(1000), target=math.nan)
    for at in (1500.0, "1500", True):
        with pytest.raises(TypeError, match="at must be the number of a step, a whole number"):
            forecast(power_law(1000), at=at)
    assert forecast(power_law(1000), at=np.int64(1500)).at == 1500


def test_a_step_that_is_behind_is_an_error():
    with pytest.raises(ValueError, match="not ahead"):
        forecast(power_law(1000), at=10)


def test_a_long_curve_stays_small_and_keeps_its_shape():
    losses = np.linspace(5, 1, 100_000)
    curve = LossCurve.of(range(len(losses)), losses)
    steps, means = curve.points
    assert len(steps) <= 1024
    assert curve.num_losses == len(losses)
    np.testing.assert_allclose(means, np.interp(steps, np.arange(len(losses)), losses), rtol=1e-9)


def test_what_is_not_finite_is_left_out():
    curve = LossCurve.of(range(4), [1.0, math.nan, math.inf, 2.0])
    np.testing.assert_array_equal(curve.points[1], [1.0, 2.0])
    np.testing.assert_array_equal(curve.points[0], [0, 3])


def test_it_goes_on_after_a_resume():
    whole, first, second = LossCurve(), LossCurve(), LossCurve()
    for step in range(3000):
        whole.append(step, float(step))
        (first if step < 1501 else second).append(step, float(step))
        if step == 1500:
            second.load_state_dict(first.state_dict())
    for one, other in zip(whole.points, second.points, strict=True):
        np.testing.assert_array_equal(one, other)
