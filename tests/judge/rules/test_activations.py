"""Rules about what the layers give."""

import dataclasses
import math

import numpy as np
import pytest

from forewarn.types import BatchNormState, ParameterInfo, RunInfo, Severity
from tests.judge.rules.runs import Run, info


def fed(code, rows, info=None):
    """One step per row of readings."""
    run = Run(code, info=info)
    for row in rows:
        run.feed(row)
    return run


# ---- dead units ----


def test_dead_units_began_when_the_window_did_so_that_they_explain_what_was_seen_within_it():
    zeros = [{"activation/zero_fraction": {"relu": 0.9}}] * 9
    run = fed("A101", [*zeros, {"activation/zero_fraction": {"relu": 0.9}, "activation/dead_fraction": {"relu": 0.6}}])
    (alert,) = run.ledger.alerts
    assert alert.severity is Severity.WARNING
    assert alert.finding.evidence["lasting_steps"] == 10
    assert alert.finding.evidence["zero_fraction"] == pytest.approx(0.9)


def test_dead_units_do_not_claim_to_be_older_than_what_is_remembered_of_them():
    fine, dead = (
        {"activation/zero_fraction": {"relu": 0.9}, "activation/dead_fraction": {"relu": share}} for share in (0.1, 0.6)
    )
    run = fed("A101", [fine] * 50 + [dead] * 300)
    (alert,) = run.ledger.alerts
    assert alert.finding.evidence["lasting_steps"] <= 300 + 10


def test_a_layer_with_no_unit_left_is_critical():
    run = fed("A101", [{"activation/dead_fraction": {"a": 1.0, "b": 0.2}}])
    assert [(alert.scope, alert.severity) for alert in run.ledger.alerts] == [("a", Severity.CRITICAL)]


# ---- exploding activations ----


def magnitudes(values):
    return [{"activation/abs_max": {"a": 1.0, "b": value}} for value in values]


healthy = {
    "constant": [50.0] * 60,
    "growing into place": list(np.geomspace(0.01, 3000, 60)),
    "growing slowly": list(np.linspace(100, 5000, 60)),
    "noisy": list(np.random.default_rng(0).lognormal(5, 0.5, 60)),
    "one absurd batch": [50.0] * 20 + [5000.0] + [50.0] * 20,
    "massive from the first": [8000.0] * 60,
    "missing at times": [50.0, math.nan] * 30,
}


@pytest.mark.parametrize("name", healthy)
def test_healthy_magnitudes_are_quiet(name):
    assert fed("A103", magnitudes(healthy[name])).ledger.alerts == ()


def test_growth_that_lasts_names_the_layer_and_its_level():
    (alert,) = fed("A103", magnitudes([50.0] * 20 + [5000.0] * 3)).ledger.alerts
    assert (alert.scope, alert.since) == ("b", 21)
    assert alert.finding.evidence["level"] == pytest.approx(50)
    assert alert.finding.evidence["first"] == "b"


def counts(*rows, loss=1.0):
    return [
        {"activation/nonfinite": dict(zip("abc", row, strict=True)), "train/loss": each}
        for row, each in zip(rows, [loss] * len(rows), strict=True)
    ]


def test_values_that_become_non_finite_name_the_first_layer_that_has_them():
    run = fed("A103", counts((0, 0, 0), (0, 5, 9)))
    assert {alert.scope: alert.finding.evidence["first"] for alert in run.ledger.alerts} == {"b": "b", "c": "b"}
    assert {alert.severity for alert in run.ledger.alerts} == {Severity.CRITICAL}


def test_a_mask_of_infinities_is_left_alone_while_the_loss_is_finite():
    assert fed("A103", counts(*[(0, 5, 0)] * 5)).ledger.alerts == ()
    assert fed("A103", counts(*[(0, 5, 5)] * 2, loss=math.nan)).codes == {"A103"}


def test_a_bad_input_is_no_fault_of_the_layers():
    assert fed("A103", counts((0, 0, 0), (4, 5, 9), loss=math.nan)).ledger.alerts == ()


# ---- collapse ----


def with_outputs(num):
    return RunInfo(parameters={"head.weight": ParameterInfo((num, 8), "Linear.weight", "float32", 0, True)})


def states(ranks, cosine=0.5):
    return [
        {"activation/row_cosine": {"head": cosine}, "activation/effective_rank": {"head": float(rank)}}
        for rank in ranks
    ]


def test_rows_that_come_to_lie_on_one_line_have_collapsed_unless_two_classes_need_no_more():
    falling = states([9.0] * 12 + [1.01] * 5)
    assert fed("A104", falling, with_outputs(10)).codes == {"A104"}
    assert fed("A104", falling, with_outputs(2)).codes == set()


def test_rows_that_never_differed_more_did_not_collapse():
    assert fed("A104", states([1.02] * 30), with_outputs(10)).codes == set()


def test_nothing_is_judged_at_the_very_start():
    assert fed("A104", states([1.0] * 9, cosine=1.0)).codes == set()
    assert fed("A104", states([1.0] * 12, cosine=1.0)).codes == {"A104"}


# ---- batch normalisation ----


def test_each_state_is_named_and_what_is_meant_is_not_reported():
    row = {state.name.lower(): float(state) for state in BatchNormState}
    run = fed("A105", [{"activation/batchnorm_state": row}] * 2)
    assert {alert.scope: alert.finding.evidence["cause"] for alert in run.ledger.alerts} == {
        "in_evaluation": "in_evaluation",
        "stands_still": "stands_still",
    }
    first = {alert.scope: alert.remedies[0].action for alert in run.ledger.alerts}
    assert first == {"in_evaluation": "call_train", "stands_still": "set_momentum"}
    assert all(dataclasses.asdict(alert)["remedies"] for alert in run.ledger.alerts)


def test_a_batch_norm_that_is_never_called_is_not_stuck():
    known = info(vectors=["used.weight", "left.weight"])
    for outputs in ({"used": 0.1}, {"used": 0.1, "left": 0.1}):
        run = Run("A105", info=known)
        for _ in range(4):
            states = {"used": 0.0, "left": float(BatchNormState.STANDS_STILL)}
            run.feed({"activation/batchnorm_state": states, "activation/mean": outputs})
        assert bool(run.ledger.alerts) == ("left" in outputs)


@pytest.mark.parametrize(
    ("width", "share", "fires"),
    [(16, 0.5, False), (16, 0.6875, False), (16, 0.8125, True), (30, 0.6, False), (1024, 0.5625, True)],
)
def test_half_of_a_few_channels_may_be_off_by_chance(width, share, fires):
    weight = ParameterInfo((width, 8, 3, 3), "Conv2d.weight", "float32", 0, True)
    run = Run("A101", info=RunInfo(parameters={"conv.weight": weight}))
    for _ in range(5):
        run.feed({"activation/dead_fraction": {"relu": share}})
    assert bool(run.ledger.alerts) == fires


@pytest.mark.parametrize(
    ("outputs", "before", "acts", "severities"),
    [
        (1, 0.9999, 0, []),
        (1, 0.9, 0, [Severity.WARNING]),
        (1, 0.998, 0, []),
        (4, 0.9999, 0, [Severity.WARNING]),
        (4, 0.9999, 2, []),
        (4, 0.9, 2, [Severity.WARNING]),
        (1, 0.9, 2, [Severity.INFO]),
    ],
)
def test_a_critic_and_a_policy_may_begin_with_samples_that_look_alike(outputs, before, acts, severities):
    weight = ParameterInfo((outputs, 8), "Linear.weight", "float32", 0, True)
    run = Run("A104", info=RunInfo(parameters={"head.weight": weight}))
    for step in range(20):
        cosine = before if step < 10 else 0.9999
        run.feed({"activation/row_cosine": {"head": cosine}, "update/separate_losses": acts, "train/loss": 1.0})
    assert [alert.severity for alert in run.ledger.alerts] == severities
