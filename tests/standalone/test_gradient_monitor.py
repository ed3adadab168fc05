"""The gradient functions against numpy, and their only source: the statistics engine."""

import ast
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import forewarn
from forewarn.standalone import gradient_monitor


@pytest.fixture
def model():
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    made(torch.randn(16, 4)).square().mean().backward()
    return made


def test_the_frequency_may_have_its_short_name(model):
    shown = []
    monitor = forewarn.GradientMonitor(log_freq=2, verbose=True, show=shown.append)
    for epoch in range(4):
        monitor.update(epoch, model)
    assert len(shown) == 2
    with pytest.raises(TypeError, match="log_frequency and log_freq are the same"):
        forewarn.GradientMonitor(log_freq=2, log_frequency=2)


def test_statistics_are_those_of_all_values_together(model):
    values = np.concatenate([each.grad.double().numpy().reshape(-1) for each in model.parameters()])
    norms = [np.linalg.norm(each.grad.double().numpy()) for each in model.parameters()]
    found = forewarn.compute_gradient_statistics(model)
    expected = {
        "num_layers": 4, "global_norm": np.linalg.norm(values), "mean": values.mean(), "std": values.std(),
        "min": values.min(), "max": values.max(), "zero_fraction": (values == 0).mean(), "num_nonfinite": 0,
        "mean_norm": np.mean(norms), "std_norm": np.std(norms), "min_norm": min(norms), "max_norm": max(norms),
    }  # fmt: skip
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-9)


def test_layers_without_a_gradient_are_left_out_and_one_that_is_broken_is_no_number(model):
    model[0].bias.grad = None
    model[2].weight.grad[0, 0] = math.inf
    norms = forewarn.compute_layer_gradient_norms(model)
    assert list(norms) == ["0.weight", "2.weight", "2.bias"]
    assert norms["0.weight"] == pytest.approx(float(model[0].weight.grad.norm()), rel=1e-5)
    assert math.isnan(norms["2.weight"])
    assert forewarn.detect_exploding_gradients(norms) == ["2.weight"]


def test_a_model_without_gradients_has_no_statistics():
    found = forewarn.compute_gradient_statistics(nn.Linear(2, 2))
    assert found.pop("num_layers") == 0
    assert all(math.isnan(value) for value in found.values())
    assert forewarn.compute_layer_gradient_norms(nn.Linear(2, 2)) == {}


def test_vanishing_and_exploding_layers_are_named():
    norms = {"a": 1e-9, "b": 0.5, "c": 11.0, "d": 10.0}
    assert forewarn.detect_vanishing_gradients(norms) == ["a"]
    assert forewarn.detect_exploding_gradients(norms) == ["c"]
    assert forewarn.detect_vanishing_gradients(norms, threshold=1.0) == ["a", "b"]


def test_the_ratio_of_two_losses_is_that_of_their_gradients_and_leaves_both_alone():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    output = model(torch.randn(16, 4))
    a, b = output[:, 0].square().mean(), (output[:, 1] - 1).square().mean()
    first, second = (torch.autograd.grad(loss, model[2].parameters(), retain_graph=True) for loss in (a, b))
    expected = (
        torch.cat([each.reshape(-1) for each in first]).norm() / torch.cat([e.reshape(-1) for e in second]).norm()
    )
    assert forewarn.compute_task_gradient_ratio(a, b, model) == pytest.approx(float(expected), rel=1e-5)
    assert forewarn.compute_task_gradient_ratio(10 * a, a, model, shared="0") == pytest.approx(10, rel=1e-5)
    assert all(each.grad is None for each in model.parameters())
    (a + b).backward()


def test_losses_with_nothing_in_common_are_one_clear_sentence():
    a, b = nn.Linear(2, 1), nn.Linear(2, 1)
    x = torch.ones(1, 2)
    with pytest.raises(ValueError, match="cannot be compared"):
        forewarn.compute_task_gradient_ratio(a(x).sum(), b(x).sum(), nn.ModuleList([a, b]))


@pytest.mark.parametrize(
    ("ratios", "collapsed", "words"),
    [
        ([1.0] * 20, False, "no collapse: mean gradient ratio 1"),
        ([1.0] * 10 + [8.0] * 10, True, "the first task dominates and the second is starved"),
        ([0.1] * 10, True, "the second task dominates and the first is starved"),
        ([9.0] * 9, False, "not enough data: 9 of 10"),
        ([9.0] * 9 + [math.nan], False, "not enough data"),
        ([5.0] * 10, False, "no collapse"),
    ],
)
def test_a_collapse_is_told_by_the_mean_of_the_window(ratios, collapsed, words):
    found, message = forewarn.detect_task_collapse(ratios)
    assert found is collapsed
    assert words in message


def test_window_and_threshold_of_a_collapse_can_be_chosen():
    assert forewarn.detect_task_collapse([3.0] * 4, window_size=4, collapse_threshold=2.0)[0]
    with pytest.raises(ValueError, match="more than 1"):
        forewarn.detect_task_collapse([1.0], collapse_threshold=0.5)


def test_the_summary_has_mean_spread_peak_layers_and_balance(model):
    monitor = forewarn.GradientMonitor(log_frequency=2)
    norms = []
    for epoch in range(6):
        for parameter in model.parameters():
            parameter.grad *= 1.5
        with torch.no_grad():
            model[2].bias.grad.fill_(1e-12)
        found = monitor.update(epoch, model, task_ratio=4.0)
        assert (found is None) is (epoch % 2 == 1)
        if found:
            norms.append(found["global_norm"])
    summary = monitor.get_summary()
    assert summary.mean == pytest.approx(np.mean(norms))
    assert summary.std == pytest.approx(np.std(norms, ddof=1))
    assert (summary.peak, summary.peak_at) == (pytest.approx(max(norms)), 4)
    assert summary.vanishing == ("2.bias",)
    assert summary.exploding == ()
    assert summary.task_balance == "too early to tell (6 of 10 checks): the tasks 4 so far, uneven"
    for epoch in range(6, 10):
        monitor.update(epoch, model, task_ratio=4.0)
    assert monitor.get_summary().task_balance.startswith("uneven: the tasks 4 over the last 10")
    text = str(monitor.get_summary())
    assert "±" in text
    assert " in epoch 6\n" in text
    assert "vanishing layers:  2.bias" in text


def test_an_empty_summary_says_that_there_is_not_enough_data():
    assert str(forewarn.GradientMonitor().get_summary()).count("not enough data") == 3
    with pytest.raises(ValueError, match="at least 1"):
        forewarn.GradientMonitor(log_frequency=0)


def test_the_summary_has_mean_and_maximum_over_layers(model):
    monitor = forewarn.GradientMonitor(log_frequency=1)
    norms = []
    for epoch in range(3):
        for parameter in model.parameters():
            parameter.grad *= 2
        model[0].bias.grad[0] = math.nan
        norms += [{n: float(p.grad.double().norm()) for n, p in model.named_parameters() if n != "0.bias"}]
        monitor.update(epoch, model)
    summary = monitor.get_summary()
    values = [norm for check in norms for norm in check.values()]
    assert summary.layer_mean == pytest.approx(np.mean(values), rel=1e-5)
    assert summary.layer_max == pytest.approx(max(values), rel=1e-5)
    assert summary.layer_max_in == max(norms[-1], key=norms[-1].get)
    assert f"norm of a layer:   mean {forewarn.types.in_words(summary.layer_mean)}, highest" in str(summary)


@pytest.mark.parametrize(("ratio", "winner"), [(8.0, "first"), (0.1, "second")])
def test_the_summary_of_a_collapsed_run_says_collapsed(model, ratio, winner):
    monitor = forewarn.GradientMonitor()
    for epoch in range(9):
        monitor.update(epoch, model, task_ratio=ratio)
    assert "collapsed" not in str(monitor.get_summary()), "one check short of a window"
    monitor.update(9, model, task_ratio=ratio)
    summary = monitor.get_summary()
    assert summary.collapsed
    assert summary.task_balance.startswith(f"collapsed, the {winner} task dominates: the tasks {ratio:g} over")
    for epoch in range(10, 20):
        monitor.update(epoch, model, task_ratio=1.5)
    assert not monitor.get_summary().collapsed


def test_a_verbose_monitor_prints_a_line_for_each_measured_epoch(model, capsys):
    monitor = forewarn.GradientMonitor(log_frequency=2, verbose=True)
    for epoch in range(4):
        monitor.update(epoch, model, task_ratio=4.0 if epoch else None)
    first, second = capsys.readouterr().out.splitlines()
    norms = forewarn.compute_layer_gradient_norms(model)
    highest = max(norms, key=norms.get)
    assert first.startswith("epoch 0: gradient norm ")
    assert f" | layers: mean {np.mean(list(norms.values())):.3g}, max {norms[highest]:.3g} in {highest}" in first
    assert "task" not in first
    assert second.endswith(" | task ratio 4 (uneven)")
    forewarn.GradientMonitor(log_frequency=1).update(0, model)
    forewarn.GradientMonitor(log_frequency=1, verbose=True, unit="step").update(7, nn.Linear(2, 2))
    assert capsys.readouterr().out == "step 7: gradient norm NaN | no layer has a finite gradient\n"


def test_names_of_layers_can_not_write_to_the_terminal(capsys):
    model = nn.ModuleDict({"\x1b[2J": nn.Linear(1, 1)})
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e9)
    monitor = forewarn.GradientMonitor(verbose=True)
    monitor.update(0, model)
    assert "\x1b" not in str(monitor.get_summary()) + capsys.readouterr().out


def test_what_was_added_up_goes_on_from_a_state(model):
    whole, first, second = (forewarn.GradientMonitor(1) for _ in range(3))
    for epoch in range(4):
        whole.update(epoch, model, task_ratio=2.0)
        (first if epoch < 2 else second).update(epoch, model, task_ratio=2.0)
        if epoch == 1:
            second.load_state_dict(first.state_dict())
        for parameter in model.parameters():
            parameter.grad *= 1.5
    assert second.get_summary() == whole.get_summary()


def test_parameters_may_be_given_by_their_usual_names_elsewhere(model):
    norms = {"a": 1e-9, "b": 11.0}
    assert forewarn.detect_vanishing_gradients(gradient_norms=norms) == ["a"]
    assert forewarn.detect_exploding_gradients(gradient_norms=norms, threshold=5) == ["b"]
    assert forewarn.detect_task_collapse(gradient_ratios=[9.0] * 10)[0]
    loss = model(torch.ones(1, 4)).sum()
    assert forewarn.compute_task_gradient_ratio(task1_loss=3 * loss, task2_loss=loss, model=model) == pytest.approx(3)
    assert forewarn.compute_task_gradient_ratio(loss_a=loss, task2_loss=loss, model=model) == pytest.approx(1)
    with pytest.raises(TypeError, match="norms and gradient_norms are the same; give one of them"):
        forewarn.detect_vanishing_gradients(norms=norms, gradient_norms=norms)
    with pytest.raises(TypeError, match="norms"):
        forewarn.detect_vanishing_gradients(norms, gradient_norms=norms)


def test_everything_comes_from_the_engine(model, monkeypatch):
    engine = gradient_monitor.measure

    def twice(tensors, *args):
        return engine([2 * each for each in tensors], *args)

    before = forewarn.compute_layer_gradient_norms(model)
    monkeypatch.setattr(gradient_monitor, "measure", twice)
    after = forewarn.compute_layer_gradient_norms(model)
    assert after == pytest.approx({name: 2 * norm for name, norm in before.items()}, rel=1e-5)


FACADES = ("gradient_monitor", "weight_update_monitor")


@pytest.mark.parametrize("name", FACADES)
def test_a_facade_only_hands_gradients_to_the_engine(name):
    """`.grad` may be listed and asked whether it is there; whatever is computed of it, the engine computes."""
    tree = ast.parse((Path(gradient_monitor.__file__).parent / f"{name}.py").read_text())
    parents = {child: parent for parent in ast.walk(tree) for child in ast.iter_child_nodes(parent)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == "grad":
            assert isinstance(parents[node], ast.ListComp | ast.Compare), ast.unparse(parents[node])
