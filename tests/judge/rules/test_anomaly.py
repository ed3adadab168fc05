"""metric-anomaly: jumps, new levels and drift are seen in metrics of any kind, and their usual noise is not."""

import numpy as np
import pytest
import torch

import forewarn
from forewarn.config import Config
from forewarn.judge.diagnosis import replay
from forewarn.judge.rules.anomaly import CODE, MetricAnomaly, metric_anomaly
from forewarn.judge.series import Panel
from forewarn.types import Severity


def noise(seed, size=300):
    return np.random.default_rng(seed).normal(size=size)


def wandering(seed, size=300, memory=0.8):
    values = [0.0]
    for step in noise(seed, size - 1):
        values.append(memory * values[-1] + step)
    return np.array(values)


AFTER = np.arange(300) >= 200
USUAL = {
    "noise": lambda seed: 10 + noise(seed),
    "of any size": lambda seed: np.exp(noise(seed)),
    "wandering": lambda seed: 100 + wandering(seed),
    "falling": lambda seed: 1 + 2 * np.exp(-np.arange(300) / 60) + 0.05 * noise(seed),
    "exactly rising": lambda seed: 0.01 * np.arange(300),
    "constant": lambda seed: np.full(300, 3.0),
    "counts": lambda seed: np.random.default_rng(seed).poisson(4.0, 300),
}
UNUSUAL = {
    "new level": lambda seed: 10 + noise(seed) + 12 * AFTER,
    "drop": lambda seed: (100 + 3 * noise(seed)) * np.where(AFTER, 0.5, 1.0),
    "a hundredfold": lambda seed: np.exp(0.5 * noise(seed)) * np.where(AFTER, 100.0, 1.0),
    "drift": lambda seed: 10 + noise(seed) + 0.05 * np.maximum(0, np.arange(300) - 150),
}


def findings(values, every=1, **settings):
    """What the rule finds at each reading, or at some, by its index."""
    column, steps = np.asarray(values, np.float32).reshape(-1, 1), np.arange(len(values))
    limits = MetricAnomaly(**settings)
    found = {}
    for at in range(0, len(steps), every):
        for one in metric_anomaly(Panel(("",), steps[: at + 1], column[: at + 1]), settings=limits):
            found[at] = one
    return found


@pytest.mark.parametrize("kind", USUAL)
def test_what_is_usual_for_a_metric_is_no_warning(kind):
    for seed in range(3):
        found = findings(USUAL[kind](seed), every=4)
        assert not [step for step, one in found.items() if one.severity > Severity.INFO]


@pytest.mark.parametrize("kind", UNUSUAL)
def test_what_is_not_is_a_warning(kind):
    for seed in range(3):
        found = findings(UNUSUAL[kind](seed), every=4)
        first = min(step for step, one in found.items() if one.severity is Severity.WARNING)
        assert 150 < first < 270


def test_one_reading_is_information_and_its_numbers_say_how_far():
    values = 10 + noise(0)
    values[250] = 40.0
    (seen,) = findings(values).values()
    assert seen.severity is Severity.INFO
    assert seen.value == pytest.approx(40.0)
    assert 10 < seen.bound < 40
    assert seen.evidence["level"] == pytest.approx(10, abs=1.5)


def test_a_jump_that_recurs_is_usual():
    values = 10 + noise(0) * 0.1
    values[::50] += 8.0
    assert max(findings(values), default=0) < 120


@pytest.mark.parametrize(("direction", "expected"), [("up", True), ("down", False), ("both", True)])
def test_one_direction_may_be_fine(direction, expected):
    assert bool(findings(10 + noise(1) + 20 * AFTER, every=4, direction=direction)) is expected


def train(path, **given):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with forewarn.watch(model, optimizer, path, views=[], **given) as monitor:
        for step in range(60):
            monitor.log("my/reward", 1.0 + 0.01 * step if step < 50 else 9.0)
            monitor.log("my/other", 5.0 if step < 50 else 70.0)
            monitor.step(1.0)
    return [alert for alert in monitor.alerts if alert.code == CODE]


def test_only_named_metrics_are_watched_and_a_stored_run_is_judged_alike(tmp_path):
    assert train(tmp_path / "off") == []
    live = train(tmp_path / "on", rules=[forewarn.anomaly("my/reward")])
    assert [(alert.scope, alert.severity) for alert in live] == [("my/reward", Severity.WARNING)]
    with forewarn.open_run(tmp_path / "on") as run:
        stored = [
            alert for alert in replay(run, Config.from_stored(run.config).rule_set()).alerts if alert.code == CODE
        ]
    assert [(alert.scope, alert.since, alert.last) for alert in stored] == [
        (alert.scope, alert.since, alert.last) for alert in live
    ]
    by_pattern = train(tmp_path / "all", config={"anomalies": ["my/*"]})
    assert {alert.scope for alert in by_pattern} == {"my/reward", "my/other"}


@pytest.mark.parametrize("names", [(), ("reward",), (3,)])
def test_what_is_no_metric_is_refused(names):
    with pytest.raises(ValueError, match="names of metrics"):
        forewarn.anomaly(*names)
