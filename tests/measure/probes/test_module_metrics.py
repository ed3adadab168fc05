"""Metrics of the user's own in a watched run."""

import logging

import numpy as np
import pytest
import torch
from torch import nn

import forewarn
from forewarn import (
    ActivationDifferenceMetric,
    ActivationMetric,
    GradientMetric,
    ParameterDifferenceMetric,
    ParameterMetric,
)
from forewarn.config import Config
from forewarn.judge.diagnosis import replay


def train(model, optimizer, monitor, steps, micro_batches=1):
    """Trains, and gives what the last step saw: inputs, gradients as the optimizer used them, weights before it."""
    for step in range(steps):
        before = {name: each.detach().clone() for name, each in model.named_parameters()}
        torch.manual_seed(step)
        inputs = [torch.randn(3, 4) for _ in range(micro_batches)]
        for x in inputs:
            loss = model(x).square().mean()
            loss.backward()
        gradients = {name: each.grad.clone() for name, each in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        monitor.step(loss)
    return inputs, gradients, before


def test_each_kind_is_recorded_under_its_own_family_and_equals_a_computation_by_hand(small, watch):
    model, optimizer = small
    at_first = {name: each.detach().clone() for name, each in model.named_parameters()}
    monitor = watch(
        model,
        optimizer,
        metrics=[
            ActivationMetric("row_norm", lambda x: x.norm(dim=-1), "0"),
            ActivationMetric("abs_max"),
            ActivationMetric("spread", lambda x: x, "0", lambda v: {"[min]": v.min(), "[max]": v.max()}),
            ParameterMetric("largest", lambda p: p.abs().max(), r".*weight"),
            GradientMetric("norm"),
            ParameterDifferenceMetric("moved", lambda p, q: (p - q).norm()),
        ],
    )
    inputs, gradients, before = train(model, optimizer, monitor, 3, micro_batches=2)
    then = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    then.load_state_dict(before)
    history = monitor.history
    hidden = torch.cat([then[0](x) for x in inputs]).detach()
    assert history.panel("activation_metric/row_norm").scopes == ("0",)
    assert history.series("activation_metric/row_norm", "0").last == pytest.approx(hidden.norm(dim=-1).mean().item())
    assert history.series("activation_metric/spread_max", "0").last == pytest.approx(hidden.max().item())
    assert history.series("activation_metric/spread_min", "0").last == pytest.approx(hidden.min().item())
    outputs = [then(x).abs().max().item() for x in inputs]
    assert history.series("activation_metric/abs_max", "[root module]").last == pytest.approx(np.mean(outputs))
    assert history.panel("parameter_metric/largest").scopes == ("0.weight", "2.weight")
    for name, parameter in model.named_parameters():
        moved = (parameter - at_first[name]).norm().item()
        assert history.series("gradient_metric/norm", name).last == pytest.approx(
            gradients[name].norm().item(), rel=1e-5
        )
        assert history.series("parameter_difference_metric/moved", name).last == pytest.approx(moved, rel=1e-5)


def test_metrics_are_stored_and_read_on_measured_steps_only(small, watch, tmp_path):
    model, optimizer = small
    asked = []
    metric = ActivationMetric("count", lambda x: asked.append(x) or 1.0, "0")
    monitor = watch(model, optimizer, run=tmp_path / "run", every=lambda step: step == 1, metrics=[metric])
    train(model, optimizer, monitor, 4)
    monitor.close()
    assert len(asked) == 1
    with forewarn.open_run(tmp_path / "run") as run:
        series = run.series("activation_metric/count", "0")
        assert series.steps.tolist() == [1]
        assert series.values.tolist() == [1.0]


def test_a_failing_metric_is_named_and_the_others_go_on(small, watch, caplog):
    model, optimizer = small
    metrics = [ParameterMetric("broken", lambda p: p.no_such_thing), ParameterMetric("norm")]
    monitor = watch(model, optimizer, metrics=metrics)
    with caplog.at_level(logging.WARNING, logger="forewarn"):
        train(model, optimizer, monitor, 3)
    assert [record.getMessage()[:44] for record in caplog.records] == ["parameter metric 'broken' failed on 0.weight"]
    assert monitor.history.series("parameter_metric/norm", "0.bias").last > 0
    assert not monitor.alerts


@pytest.mark.parametrize(
    ("metric", "error", "told"),
    [
        ("norm", TypeError, "ActivationMetric"),
        (ActivationDifferenceMetric("norm"), ValueError, "needs a model to compare with"),
        (ActivationMetric("l2 norm", torch.norm), ValueError, "cannot be the name of a series"),
    ],
)
def test_what_can_not_be_measured_is_an_error_at_attaching(small, watch, metric, error, told):
    with pytest.raises(error, match=told):
        watch(*small, metrics=[metric])
    with pytest.raises(ValueError, match="already exists"):
        watch(*small, metrics=[GradientMetric("norm"), GradientMetric("norm")])


@pytest.mark.parametrize(
    "healthy", [(1, 0), (1,), 3.0, ("0", 1), (float("nan"), 1.0), (None, float("nan")), (0, 10**400)]
)
def test_a_healthy_range_is_two_numbers_in_order(healthy):
    with pytest.raises(ValueError, match="lowest and the highest"):
        GradientMetric("norm", healthy=healthy)


def test_a_healthy_range_is_stored_with_the_run(small, watch, tmp_path):
    model, optimizer = small
    metrics = [
        GradientMetric("norm", healthy=(None, 1e-9)),
        ParameterMetric("rms", healthy=(0, 5)),
        ActivationMetric("std"),
    ]
    with watch(model, optimizer, run=tmp_path / "run", metrics=metrics) as monitor:
        train(model, optimizer, monitor, 4)
    named = {alert.scope for alert in monitor.alerts if alert.code == "M102"}
    assert named == {f"gradient_metric/{name}/norm" for name, _ in model.named_parameters()}
    alert = monitor.alerts[0]
    assert alert.finding.bound == 1e-9
    assert alert.finding.evidence == {}, "there is one bound, and it is named"
    assert [each.action for each in alert.remedies] == ["inspect_layer", "snapshot", "widen_range"]
    with forewarn.open_run(tmp_path / "run") as run:
        assert run.info.metrics == {
            "gradient_metric/norm": (-np.inf, 1e-9),
            "parameter_metric/rms": (0.0, 5.0),
            "activation_metric/std": (-np.inf, np.inf),
        }
        assert repr(replay(run, Config.from_stored(run.config).rule_set()).alerts) == repr(monitor.alerts)


def test_a_module_monitor_takes_no_range_and_no_reference(small):
    monitor = forewarn.ModuleMonitor()
    with pytest.raises(ValueError, match="judged in a watched run"):
        monitor.add(GradientMetric("norm", healthy=(0, 1)))
    with pytest.raises(ValueError, match="set_reference_module"):
        monitor.add(ParameterDifferenceMetric("norm", reference=small[0]))


def test_the_weights_that_differences_are_taken_from_survive_a_resume(small, watch):
    model, optimizer = small
    metrics = [ParameterDifferenceMetric("norm")]
    monitor = watch(model, optimizer, metrics=metrics)
    train(model, optimizer, monitor, 2)
    saved = monitor.state_dict()
    other = watch(model, optimizer, metrics=metrics)
    other.load_state_dict(saved)
    for each in (monitor, other):
        each.step(1.0)
    expected = monitor.history.series("parameter_difference_metric/norm", "0.weight").last
    assert expected > 0
    assert other.history.series("parameter_difference_metric/norm", "0.weight").last == expected


def test_training_is_bit_identical_with_metrics(watch):
    def run(metrics):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        train(model, optimizer, watch(model, optimizer, metrics=metrics), 10)
        return model.state_dict(), torch.get_rng_state()

    every = [ActivationMetric("std"), ParameterMetric("norm"), GradientMetric("sum", torch.sum)]
    (bare, state), (asked, other) = run([]), run(every)
    assert all(torch.equal(bare[name], asked[name]) for name in bare)
    assert torch.equal(state, other)


@pytest.mark.parametrize("suffix", ["[max]", "max", ".max", "-max", "_max", "/max", "\nmax"])
def test_a_range_holds_whatever_an_aggregation_puts_behind_the_name(suffix, small, watch):
    model, optimizer = small
    spread = ActivationMetric(
        "spread",
        lambda x: x.abs().max(),
        "0",
        aggregate=lambda values: {suffix: values.max()},
        healthy=(np.int64(100), 1e39),
    )
    monitor = watch(model, optimizer, metrics=[spread, ActivationMetric("spreading", lambda x: x.sum(), "0")])
    for _ in range(4):
        loss = model(torch.ones(2, 4)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        monitor.step(loss)
    assert [alert.scope for alert in monitor.alerts if alert.code == "M102"] == ["activation_metric/0/spread_max"]
    assert monitor._loop.failures == {}
    assert "activation_metric/spreading" in monitor.history
