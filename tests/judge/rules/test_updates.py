"""Rules about the updates: an lr that jumps is named before the loss shows it, one that follows a plan is not."""

import math

import numpy as np
import pytest

from forewarn.types import ParameterInfo, RunInfo, Severity
from tests.judge.rules.runs import Run, info

WEIGHTS = ("a.weight", "b.weight", "c.weight")
KNOWN = info(*WEIGHTS, vectors=["a.bias"])
STEPS = np.arange(1500)


def train(
    schedule, *, steps=1500, every=100, known=KNOWN, codes=("U102", "U103", "U104"), adam=True, noise=0.15, seed=0
):
    """Update ratios as Adam makes them: the lr over the weights' scale, larger in the first steps, with noise."""
    run = Run(*codes, info=known)
    rng = np.random.default_rng(seed)
    for step in range(steps):
        lr = schedule(step)
        readings = {"train/lr": {"0": lr}}
        if step < 10 or step % every == 0 or step <= run.schedule.until:
            transient = 1 + 4 * math.exp(-step / 15) if adam else 1.0
            typical = 8 * lr * transient
            each = {scope: typical * math.exp(noise * rng.normal()) for scope in WEIGHTS}
            started_at_zero = {"a.bias": math.nan if step == 0 else 1 / step}
            readings["update/ratio"] = each | started_at_zero
            readings["monitor/update_ratio_median"] = float(np.median(list(each.values())))
        run.feed(readings)
    return run


def warm_up(peak, steps, end=None):
    def lr(step):
        if step < steps:
            return peak * step / steps
        return peak if end is None else peak * 0.5 * (1 + math.cos(math.pi * (step - steps) / (end - steps)))

    return lr


plans = {
    "constant": lambda step: 1e-3,
    "warm-up of 20": warm_up(1e-3, 20),
    "warm-up of 50": warm_up(1e-3, 50),
    "warm-up of 300": warm_up(1e-3, 300),
    "warm-up over the whole run": warm_up(1e-3, 5000),
    "warm-up and cosine to zero": warm_up(1e-3, 100, 1500),
    "quadratic warm-up": lambda step: 1e-3 * min(1, (step / 300) ** 2),
    "doubling": lambda step: min(1e-3, 1e-5 * 2 ** (step // 100)),
    "step decay": lambda step: 1e-3 * 0.1 ** (step // 500),
    "linear decay to zero": lambda step: 1e-3 * (1 - step / 1500),
    "warm restarts": lambda step: 1e-3 * 0.5 * (1 + math.cos(math.pi * (step % 250) / 250)),
    "cycles": lambda step: 1e-5 + 1e-3 * (1 - abs((step % 40) / 20 - 1)),
    "one cycle": lambda step: 4e-5 + 1e-3 * math.sin(math.pi * step / 1500),
}


@pytest.mark.parametrize("every", [1, 20, 100, 400])
@pytest.mark.parametrize("name", plans)
def test_a_plan_is_quiet(name, every):
    assert train(plans[name], every=every).ledger.alerts == ()


@pytest.mark.parametrize("at", [250, 300, 313, 1111])
@pytest.mark.parametrize("factor", [3.5, 10, 30])
def test_a_jump_of_the_lr_is_named_at_the_very_step(at, factor):
    run = train(lambda step: 1e-3 * (factor if step >= at else 1), codes=("U104",), steps=at + 40)
    (alert,) = run.ledger.alerts
    assert (alert.since, alert.fired, alert.severity) == (at, at, Severity.WARNING)
    assert alert.finding.evidence["lr_before"] == pytest.approx(1e-3)
    assert str(alert.remedies[0]) == f"lower_lr {1e-3 * factor:.4g} → 0.001"
    assert str(alert.remedies[1]) == f"roll_back before_step {at}"


def test_the_measured_ratio_confirms_it_and_names_the_tensor_that_jumped_most():
    run = train(lambda step: 1e-3 * (30 if step >= 313 else 1), codes=("U104",), steps=320)
    finding = run.ledger.firing[0].finding
    assert finding.step > 313
    assert finding.evidence["tensor"] in WEIGHTS
    assert finding.value == pytest.approx(8 * 30e-3, rel=0.4)


def test_a_jump_during_a_slow_schedule_is_seen_too():
    plan = warm_up(1e-3, 100, 1500)
    run = train(lambda step: plan(step) * (30 if step >= 700 else 1), codes=("U104",), steps=720)
    assert run.ledger.alerts[0].since == 700


def test_a_return_to_the_declared_peak_is_a_restart_and_a_jump_beyond_it_is_not():
    decayed = lambda step: 1e-3 if step < 300 else 1e-5  # noqa: E731
    declared = RunInfo(parameters=KNOWN.parameters, groups=({"lr": 1e-3, "initial_lr": 1e-3},))
    quiet = train(lambda step: 1e-3 if step >= 1400 else decayed(step), known=declared, codes=("U104",))
    assert quiet.ledger.alerts == ()
    loud = train(lambda step: 4e-3 if step >= 1400 else decayed(step), known=declared, codes=("U104",))
    assert loud.ledger.alerts[0].since == 1400


@pytest.mark.parametrize("every", [1, 20])
def test_a_restart_of_a_group_returns_to_the_peak_of_that_group(every):
    restarts = plans["warm restarts"]
    declared = RunInfo(parameters=KNOWN.parameters, groups=({"lr": 1e-3}, {"lr": 1e-2}))
    for later, jumped in ((1.0, False), (4.0, True)):
        run = Run("U104", info=declared)
        for step in range(600):
            small = restarts(step) * (later if step >= 500 else 1)
            readings = {"train/lr": {"0": small, "1": 10 * restarts(step)}}
            if step < 10 or step % every == 0:
                readings["monitor/update_ratio_median"] = 8 * small
            run.feed(readings)
        assert bool(run.ledger.alerts) is jumped


def test_a_rise_within_a_decay_is_a_jump_though_the_rate_has_been_higher():
    decay = plans["linear decay to zero"]
    run = train(lambda step: decay(step) * (5 if step >= 1350 else 1), codes=("U104",), every=20)
    assert run.ledger.alerts[0].since == 1350


@pytest.mark.parametrize("every", [1, 20])
def test_a_jump_that_is_declared_is_quiet_and_one_off_the_plan_is_not(every):
    for declared, jumped in ((3e-2, False), (1e-3, True)):
        run = Run("U104")
        for step in range(200):
            late = step >= 105
            readings = {
                "train/lr": {"0": 3e-2 if late else 1e-3},
                "train/lr_plan": {"0": declared if late else 1e-3},
            }
            if step < 10 or step % every == 0:
                readings["monitor/update_ratio_median"] = 8 * readings["train/lr"]["0"]
            run.feed(readings)
        assert bool(run.ledger.alerts) is jumped


def test_gradients_that_grow_make_a_jump_without_the_lr():
    run = Run("U104")
    for step in range(40):
        run.feed({"train/lr": {"0": 0.1}, "monitor/update_ratio_median": 1e-3 if step < 30 else 4e-3})
    (alert,) = run.ledger.alerts
    assert alert.since == 30
    assert "lr_before" not in alert.finding.evidence
    assert alert.finding.evidence["lasting_checks"] >= 3
    assert alert.severity is Severity.WARNING
    assert str(alert.remedies[0]) == "lower_lr 0.1 → 0.025"


def test_one_unusual_check_is_information():
    run = Run("U104").series("monitor/update_ratio_median", [1e-3] * 20 + [4e-3] + [1e-3] * 20)
    (alert,) = run.ledger.alerts
    assert alert.severity is Severity.INFO


def test_groups_that_are_switched_on_later_are_no_jump():
    run = Run("U104")
    for step in range(60):
        rates = {"0": 1e-3, "1": 0.0 if step < 40 else 1e-3}
        run.feed({"train/lr": rates, "monitor/update_ratio_median": 1e-3})
    assert run.ledger.alerts == ()


def test_a_tensor_that_is_rewritten_is_named_after_three_checks():
    run = Run("U102", info=KNOWN)
    for step in range(100, 105):
        run.feed({"update/ratio": {"a.weight": 0.3, "b.weight": 1e-3, "a.bias": 5.0}}, step)
    (alert,) = run.ledger.firing
    assert (alert.scope, alert.since, alert.fired) == ("a.weight", 100, 102)


def test_the_first_steps_of_adam_are_not_held_against_it():
    run = train(lambda step: 3e-3, codes=("U102",), every=1, steps=400)
    assert run.loud() == []


def test_an_lr_that_is_far_too_high_from_the_start_is_named_within_three_steps():
    run = Run("U102", info=KNOWN)
    for ratio in (5.0, 0.7, 0.38, 0.14, 0.06):  # as measured on a small GPT with Adam at lr 0.1
        run.feed({"update/ratio": dict.fromkeys(WEIGHTS, ratio), "monitor/update_ratio_median": ratio})
    assert run.loud()[0] == ("U102", "", 0)
    assert run.ledger.alerts[0].fired == 2


@pytest.mark.parametrize("begins", [0, 500], ids=["from the start", "later"])
@pytest.mark.parametrize("growth", [1, 2], ids=["constant lr", "warm-up"])
@pytest.mark.parametrize("number", [1, 3], ids=["one", "all"])
def test_matrices_that_start_at_zero_are_left_alone_while_they_grow(growth, begins, number):
    run = Run("U102", info=KNOWN)
    for step in range(begins + 64):
        moved = step - begins
        ratio = 0.0 if moved < 0 else math.nan if moved == 0 else growth / moved
        ratios = dict.fromkeys(WEIGHTS, 1e-3) | dict.fromkeys(WEIGHTS[:number], ratio)
        norms = dict.fromkeys(WEIGHTS, 0.1) | dict.fromkeys(WEIGHTS[:number], 0.1 if moved >= 0 else 0.0)
        middle = sorted(ratios.values())[1] if moved else math.nan
        run.feed({"update/ratio": ratios, "update/norm": norms, "monitor/update_ratio_median": middle})
    assert run.ledger.alerts == ()


def test_a_step_without_a_ratio_that_nothing_moved_in_is_no_start_at_zero():
    """A gradient scaler skips its first steps: then there is neither a ratio nor a norm."""
    run = Run("U102", info=KNOWN)
    for ratio in (math.nan, math.nan, 0.9, 0.8, 0.7):
        each = dict.fromkeys(WEIGHTS, ratio)
        run.feed({"update/ratio": each, "update/norm": each, "monitor/update_ratio_median": ratio})
    assert set(run.loud()) == {("U102", scope, 2) for scope in ("", *WEIGHTS)}


@pytest.mark.parametrize(("peer", "severity"), [(2e-3, Severity.INFO), (2e-8, Severity.WARNING)])
def test_one_weight_that_stands_still_among_others_that_move_is_no_matter_of_the_rate(peer, severity):
    run = Run("U103", info=KNOWN)
    for _ in range(4):
        run.feed({"update/ratio": {"a.weight": 9e-8, "b.weight": peer, "c.weight": peer}, "train/lr": {"0": 1e-3}})
    alert = next(alert for alert in run.ledger.alerts if alert.scope == "a.weight")
    assert alert.severity is severity
    assert ("raise_lr" in [remedy.action for remedy in alert.remedies]) is (severity is Severity.WARNING)


def test_a_hopeless_lr_is_named_and_says_how_far_to_raise_it():
    run = train(lambda step: 1e-10, codes=("U103",), steps=10)
    assert {alert.scope for alert in run.ledger.firing} == set(WEIGHTS)
    assert str(run.ledger.firing[0].remedies[0]) == "raise_lr 1e-10 → 1e-6"


def test_an_lr_that_decays_to_almost_nothing_is_a_plan():
    run = train(lambda step: 1e-3 * 10 ** (-step / 150), codes=("U103",), adam=False)
    assert run.ledger.alerts == ()


@pytest.mark.parametrize(
    ("losses", "codes"),
    [
        ((10.3, 7.5, 4.1, 3.3, 2.7), set()),
        ((1.6, 6.2, 3.8, 7.8, 3.9), {"U102"}),
        ((-1.0, -1.5, -2.0, -2.5, -3.0), set()),
    ],
    ids=["it falls", "it rises", "it falls below zero"],
)
def test_small_weights_may_move_far_at_first_while_the_loss_falls(losses, codes):
    run = Run("U102", info=KNOWN)
    for loss, ratio in zip(losses, (0.6, 0.8, 0.4, 0.3, 0.25), strict=True):
        run.feed(
            {"train/loss": loss, "update/ratio": dict.fromkeys(WEIGHTS, ratio), "monitor/update_ratio_median": ratio}
        )
    assert run.codes == codes
    for _ in range(200):
        run.feed({"train/loss": 1.0, "update/ratio": dict.fromkeys(WEIGHTS, 0.3), "monitor/update_ratio_median": 0.3})
    assert run.codes == {"U102"}, "later it is a fault whatever the loss does"


def test_a_rate_that_decays_to_just_the_bound_in_float32_is_spent():
    run = Run("U109")
    for step in range(400):
        run.feed({"train/lr": {"0": 1e-3 if step < 100 else 1e-6}})
    assert [(code, scope) for code, scope, _ in run.loud()] == [("U109", "0")]


def test_a_head_that_starts_small_is_not_rewritten_by_steps_of_the_usual_size():
    """The head of a policy starts at a thousandth: its first steps are many times its size, and change little."""
    shapes = {"trunk.weight": (48, 48), "head.weight": (2, 48)}
    known = {name: ParameterInfo(shape, "Linear.weight", "float32", 0, True) for name, shape in shapes.items()}
    for lr, fires in ((3e-3, False), (0.1, True)):
        run = Run("U102", info=RunInfo(parameters=known))
        for step in range(10):
            norms = {name: lr * math.sqrt(math.prod(shape)) for name, shape in shapes.items()}  # the steps of Adam
            sizes = {"trunk.weight": math.sqrt(48 / 3), "head.weight": (1e-3 + lr * step) * math.sqrt(96)}
            ratios = {name: norms[name] / size for name, size in sizes.items()}
            run.feed({"update/ratio": ratios, "update/norm": norms, "train/loss": 1.0})
        assert ("head.weight" in {alert.scope for alert in run.ledger.alerts}) == fires
