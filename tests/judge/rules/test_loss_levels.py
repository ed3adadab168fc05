"""Rules about a loss that no longer falls, or never did: what is wrong is named, noise and plans are left alone."""

import numpy as np
import pytest

from forewarn.judge.rules.loss_levels import theil_sen
from forewarn.measure.loss_course import LossCourse
from forewarn.types import AlertState, RunInfo, Severity
from tests.judge.rules.runs import Run

STEPS = np.arange(1600)
CONSTANT = np.full(len(STEPS), 1e-3)
COSINE = 1e-3 * (0.55 + 0.45 * np.cos(np.pi * STEPS / len(STEPS)))
WARM_UP = 1e-3 * np.minimum(1.0, (STEPS + 1) / 1600)
CODES = ("L104", "L105", "L106")


def noise(scale, seed=0, size=1600):
    return np.exp(scale * np.random.default_rng(seed).normal(size=size))


def judged(losses, lr=CONSTANT, codes=CODES, known=None, ratio=None):
    run, course = Run(*codes, info=known or RunInfo(groups=({"lr": lr[0]},))), LossCourse()
    for loss, rate in zip(losses, lr, strict=False):
        loss = float(np.float32(loss))
        typical = {} if ratio is None else {"update/ratio": {"a.weight": ratio}}
        run.feed({"train/loss": loss, "train/lr": {"0": rate}, **course.add(loss), **typical})
    return run


power_law = 8 * (1 + STEPS / 20.0) ** -0.1
decay = 6 * np.exp(-STEPS / 80) + 2

quiet = {
    "a power law": (power_law * noise(0.03), CONSTANT),
    "a power law in much noise": (power_law * noise(0.3), CONSTANT),
    "a slow exponential": ((6 * np.exp(-STEPS / 2500) + 1) * noise(0.1), CONSTANT),
    "a flat end of a cosine": (decay * noise(0.02), np.where(STEPS < 500, 1e-3, 1e-4)),
    "a cosine": ((3 + 2 * np.cos(np.pi * STEPS / 1600)) * noise(0.05), COSINE),
    "a warm-up in which nothing moves": (4.6 * noise(0.01), WARM_UP),
    "a solved task": (2 * np.exp(-STEPS / 60) * noise(0.5) + 0.003 * noise(1.0, 1), CONSTANT),
    "a late start": (np.where(STEPS < 300, 1.1, 0.3 + 0.8 * np.exp(-(STEPS - 300) / 400)) * noise(0.04), CONSTANT),
    "noise of single samples": (power_law * noise(1.0), CONSTANT),
    "a fall within the first steps, in noise": ((1 + 4 * np.exp(-STEPS[:900] / 8)) * noise(0.15, size=900), CONSTANT),
}


@pytest.mark.parametrize("name", quiet)
def test_nothing_is_said_of(name):
    assert judged(*quiet[name]).ledger.alerts == ()


@pytest.mark.parametrize("scale", [0.01, 0.03, 0.05])
def test_a_loss_that_stands_still_for_half_of_the_run_is_a_plateau(scale):
    run = judged(decay * noise(scale))
    assert run.codes == {"L104"}
    (alert,) = run.ledger.alerts
    assert alert.severity is Severity.WARNING
    assert alert.finding.evidence["level"] == pytest.approx(2.0, rel=0.02)
    assert str(alert.remedies[0]) == "lower_lr 0.001 → 0.000333"


def test_the_same_curve_is_no_plateau_once_the_lr_has_decayed_by_what_was_declared():
    known = RunInfo(groups=({"lr": 1e-2, "initial_lr": 1e-2},))
    assert judged(decay * noise(0.01), CONSTANT, known=known).ledger.alerts == ()


@pytest.mark.parametrize(("falls", "state"), [(False, AlertState.FIRING), (True, AlertState.RESOLVED)])
def test_a_plateau_is_over_once_the_loss_falls_and_not_because_the_lr_decays(falls, state):
    flat = np.concatenate([decay, np.full(1600, 2.0)]) * noise(0.01, size=3200)
    losses = np.where(np.arange(3200) < 1600, flat, flat * 0.9995 ** np.arange(-1600, 1600)) if falls else flat
    run = judged(losses, np.where(np.arange(3200) < 1600, 1e-3, 1e-4))
    assert [(alert.code, alert.state) for alert in run.ledger.alerts] == [("L104", state)]


def test_a_loss_that_is_the_same_for_every_batch_does_not_depend_on_its_targets():
    (alert,) = judged(np.full(len(STEPS), 4.6), CONSTANT).ledger.alerts
    assert (alert.code, alert.remedies[0].action) == ("L105", "check_objective")


def test_a_loss_with_a_high_floor_falls_by_little():
    run = Run("L105")
    for step, level in zip((0, *range(31, 256, 32)), (6480, 6390, 6360, 6340, 6330, 6280, 6250, 6210), strict=False):
        run.feed({"train/loss_level": level, "train/loss": level}, step)
    assert run.ledger.alerts == (), "a variational autoencoder with a summed loss"


@pytest.mark.parametrize("scale", [0.01, 0.02, 0.1])
def test_a_loss_that_has_not_moved_is_named_with_a_higher_lr(scale):
    run = judged(4.6 * noise(scale), np.full(len(STEPS), 1e-7))
    assert run.codes == {"L105"}, "loss-plateau would advise a lower lr"
    assert str(run.ledger.alerts[0].remedies[0]) == "raise_lr 1e-7 → 1e-6"


@pytest.mark.parametrize(("ratio", "action"), [(1e-6, "raise_lr"), (2e-3, "inspect_labels"), (0.02, "lower_lr")])
def test_a_loss_that_has_not_moved_is_explained_by_how_far_the_weights_have(ratio, action):
    (alert,) = judged(4.6 * noise(0.02, size=400), codes=["L105"], ratio=ratio).ledger.alerts
    assert alert.remedies[0].action == action


def test_a_huge_loss_that_does_not_move_is_explained_by_targets_that_are_far_away():
    (alert,) = judged(4e8 * noise(0.02, size=400), codes=["L105"], ratio=2e-3).ledger.alerts
    assert alert.remedies[0].action == "normalize_targets"


@pytest.mark.parametrize(("ratio", "codes"), [(2e-3, set()), (0.02, {"L105"})])
def test_a_loss_that_rises_surely_has_started_unless_the_steps_are_so_large_that_they_raise_it(ratio, codes):
    growing = 4.3 + 0.9 * (1 - np.exp(-STEPS[:400] / 60))  # as the codebook and the encoder of a VQ-VAE part
    assert judged(growing * noise(0.02, size=400), codes=["L105"], ratio=ratio).codes == codes


@pytest.mark.parametrize(("ratio", "codes"), [(1e-6, {"L105"}), (1e-3, set())])
def test_a_fall_of_a_few_percent_is_no_start_if_the_steps_are_tiny(ratio, codes):
    losses = np.linspace(1.28, 1.24, 400) * noise(0.005, size=400)
    assert judged(losses, codes=["L105"], ratio=ratio).codes == codes


def test_the_peak_of_a_schedule_that_has_decayed_is_to_be_raised():
    lr = np.linspace(1e-6, 1e-9, 400)
    (alert,) = judged(4.6 * noise(0.01, size=400), lr, codes=["L105"], ratio=1e-6).ledger.alerts
    assert alert.remedies[0].do == "Raise the peak learning rate from 1e-6 to 0.01"


def test_a_warm_up_over_a_third_of_a_short_run_is_waited_for_until_half_of_it():
    lr = 1e-8 * np.minimum(1.0, (STEPS[:300] + 1) / 90)
    (alert,) = judged(4.6 * noise(0.01, size=300), lr, codes=["L105"]).ledger.alerts
    assert alert.fired < 300


@pytest.mark.parametrize("steps_to_fall", [3, 10, 40])
@pytest.mark.parametrize("scale", [0.02, 0.05, 0.1])
@pytest.mark.parametrize("seed", range(3))
def test_a_loss_that_fell_by_a_quarter_and_then_stopped_has_started(steps_to_fall, scale, seed):
    losses = 8.5 * (0.73 + 0.27 * np.exp(-STEPS[:1000] / steps_to_fall))
    assert "L105" not in judged(losses * noise(scale, seed, 1000)).codes


def test_finding_the_scale_of_the_targets_is_not_learning():
    losses = np.log(2) * (1 + 0.07 * np.exp(-STEPS[:1000] / 5)) * noise(0.02, size=1000)
    assert judged(losses).codes == {"L105"}


def test_a_warm_up_that_has_ended_is_waited_for_no_longer():
    lr = 1e-8 * np.minimum(1.0, (STEPS + 1) / 400)
    (alert,) = judged(4.6 * noise(0.01), lr, codes=["L105"]).ledger.alerts
    assert alert.fired > 600


swinging = 2 + 0.8 * np.sin(STEPS[:600] / 9)
zigzag = 2 + 0.5 * (-1.0) ** STEPS[:600]


@pytest.mark.parametrize("losses", [swinging, zigzag], ids=["swinging", "from step to step"])
def test_a_loss_that_bounces_is_told_from_noise_of_the_same_size(losses):
    (alert,) = judged(losses * noise(0.05, size=600), codes=["L106"]).ledger.alerts
    assert alert.severity is Severity.WARNING
    spread = np.random.default_rng(0).permutation(losses)
    assert judged(spread, codes=["L106"]).ledger.alerts == ()


def test_bouncing_far_below_the_start_is_information_and_with_progress_nothing():
    start = np.full(64, 9.0)
    (alert,) = judged([*start, *swinging], codes=["L106"]).ledger.alerts
    assert alert.severity is Severity.INFO
    falling = swinging * np.exp(-STEPS[:600] / 300)
    assert judged(falling, codes=["L106"]).ledger.alerts == ()


def test_one_side_of_a_game_may_bounce():
    run = Run("L106")
    run.feed({"update/separate_losses": 1.0})
    for step, value in enumerate(swinging):
        run.feed({"train/loss": value, **({"train/loss_level": 2.0} if step % 32 == 31 else {})})
    (alert,) = run.ledger.alerts
    assert alert.severity is Severity.INFO


def test_the_slope_is_the_median_over_all_pairs_and_outliers_do_not_move_it():
    steps = np.arange(0, 50 * 32, 32)
    values = 5 - 0.001 * steps
    values[[3, 11, 30, 41]] += 100
    assert theil_sen(steps, values) == pytest.approx(-0.001, rel=0.02)
    pairs = [(values[j] - values[i]) / (steps[j] - steps[i]) for i in range(50) for j in range(i + 1, 50)]
    assert theil_sen(steps, values) == pytest.approx(np.median(pairs))


def test_a_bouncing_loss_is_seen_in_a_log_of_every_fourth_step():
    run = Run("L106")
    for reading, value in enumerate(2 + 0.8 * np.sin(4 * STEPS[:300] / 20)):
        run.feed({"train/loss": value, **({"train/loss_level": 2.0} if reading % 8 == 7 else {})}, 4 * reading)
    (alert,) = run.ledger.alerts
    assert alert.since < 300, "256 steps are 64 readings"
    assert alert.finding.evidence["lasting_steps"] == 256


@pytest.mark.parametrize(("at_first", "cause"), [(0.5, "large"), (1e-6, "slow")])
def test_steps_that_were_large_at_the_start_are_remembered(at_first, cause):
    run, course = Run("L105", info=RunInfo(groups=({"lr": 0.05},))), LossCourse()
    for step, loss in enumerate(4.6 * noise(0.01, size=300)):
        ratio = at_first if step < 5 else 1e-9
        run.feed({
            "train/loss": float(loss), "train/lr": {"0": 0.05}, "update/ratio": {"a.weight": ratio},
            "monitor/update_ratio_median": ratio, **course.add(float(loss)),
        })  # fmt: skip
    (alert,) = run.ledger.alerts
    assert alert.finding.evidence["cause"] == cause
