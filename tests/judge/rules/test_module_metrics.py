"""Rules about metrics of the user's own, which may be anything."""

import math

import numpy as np
import pytest

from forewarn.config import Config
from forewarn.types import AlertState, Block, RunInfo, Severity
from tests.judge.rules.runs import Run

SCOPES = tuple(f"layer{at}" for at in range(200))


def feed(run, step, **metrics):
    """Readings by metric (its family is `gradient_metric`) and scope."""
    blocks = [
        Block(step, 0.0, f"gradient_metric/{name}", tuple(values), np.array(list(values.values()), np.float32))
        for name, values in metrics.items()
    ]
    return run.feed(blocks, step)


def test_metrics_that_share_a_scope_have_alerts_of_their_own_and_are_resolved_one_by_one():
    run = Run("M101")
    feed(run, 0, norm={"a.weight": 1.0}, skew={"a.weight": 1.0})
    feed(run, 1, norm={"a.weight": math.nan}, skew={"a.weight": math.inf})
    feed(run, 2, norm={"a.weight": 1.0})
    (resolved,) = feed(run, 60, norm={"a.weight": 1.0})
    assert (resolved.scope, resolved.state) == ("gradient_metric/a.weight/norm", AlertState.RESOLVED)
    assert [each.scope for each in run.ledger.firing] == ["gradient_metric/a.weight/skew"]
    assert run.ledger.firing[0].finding.evidence == {"last_finite": 1.0}


def test_a_layer_that_is_not_called_is_not_one_whose_metric_is_not_finite():
    run = Run("M101")
    for step in range(10):
        feed(run, step, norm={"always": 1.0, "sometimes": 1.0} if step % 2 else {"always": 1.0})
    assert run.ledger.alerts == ()


def test_what_never_was_a_number_is_information():
    run = Run("M101")
    feed(run, 0, std={"one.bias": math.nan})
    assert [alert.severity for alert in run.ledger.alerts] == [Severity.INFO]


def test_a_range_holds_for_what_an_aggregation_gives_under_suffixes_and_for_no_other_metric():
    declared = {"gradient_metric/value": (0.0, 1.0), "gradient_metric/value_norm": (-math.inf, math.inf)}
    run = Run("M102", info=RunInfo(metrics=declared))
    for step in range(3):
        feed(run, step, value_max={"a": 2.0}, value_norm={"a": 2.0}, values={"a": 2.0}, value={"a": 1.0})
    assert [alert.scope for alert in run.ledger.alerts] == ["gradient_metric/a/value_max"]
    assert run.ledger.alerts[0].finding.bound == 1.0
    assert run.ledger.alerts[0].finding.evidence == {"low": 0.0, "high": 1.0}


def test_readings_outside_count_from_check_to_check_also_where_some_are_missing():
    run = Run("M102", info=RunInfo(metrics={"gradient_metric/norm": (0.0, 1.0)}))
    for step in range(5):
        feed(run, step, norm={"other": 1.0, "a": -2.0} if step % 2 == 0 else {"other": 1.0})
    assert [(alert.scope, alert.fired) for alert in run.ledger.alerts] == [("gradient_metric/a/norm", 4)]


def courses():
    """Metrics that do nothing but what they always do."""
    rng = np.random.default_rng(0)
    shape = (300, len(SCOPES))
    time = np.arange(300.0)[:, None]
    normal, cauchy = rng.normal(size=shape), rng.standard_cauchy(size=shape)
    return {
        "noise": normal,
        "heavy tails": cauchy,
        "heavy tails of one sign": np.exp(2 * normal),
        "walk": normal.cumsum(axis=0),
        "fall": np.exp(-time / 30) * np.exp(0.05 * normal),
        "growth": np.exp(time / 10) * np.exp(0.05 * normal),
        "rare bursts": (rng.random(shape) < 0.02) * np.abs(normal),
        "switch": np.where(rng.random(shape) < 0.1, 5.0, 1.0) + 0.01 * normal,
        "schedule": np.minimum(1.0, time / 100) + 0.01 * normal,
        "nearly constant": 1.0 + 1e-6 * normal,
        "zero, then anything": np.where(time < 150, 0.0, np.abs(normal)),
    }


@pytest.mark.parametrize(("name", "values"), courses().items(), ids=lambda each: each if isinstance(each, str) else "")
def test_no_usual_course_is_a_jump(name, values):
    run = Run("M103")
    for step, row in enumerate(values.astype(np.float32)):
        run.feed([Block(step, 0.0, "activation_metric/any", SCOPES, row)], step)
    assert len(run.ledger.alerts) <= 0.001 * values.size / 10, f"{name}: {len(run.ledger.alerts)} of {values.size}"


@pytest.mark.parametrize("name", ["noise", "walk", "fall", "growth", "schedule"])
def test_a_jump_by_twenty_times_its_range_is_seen_on_every_course_and_then_taken_as_usual(name):
    values = courses()[name][:120].astype(np.float32)
    run = Run("M103")
    for step, row in enumerate(values):
        moved = row + 20 * np.ptp(values[:100], axis=0) if step >= 100 else row
        run.feed([Block(step, 0.0, "activation_metric/any", SCOPES, moved)], step)
    assert len(run.ledger.alerts) == len(SCOPES)
    assert {(alert.since, alert.last, alert.severity) for alert in run.ledger.alerts} == {(101, 101, Severity.INFO)}


def test_the_bound_of_a_jump_is_that_of_the_config():
    for spans, count in ((1.0, 1), (50.0, 0)):
        run = Run("M103", config=Config.from_dict({"thresholds": {"metric_jump": {"spans": spans}}}))
        for step in range(42):
            feed(run, step, norm={"a": 1.0 + step % 5 if step < 40 else 20.0})
        assert len(run.ledger.alerts) == count
