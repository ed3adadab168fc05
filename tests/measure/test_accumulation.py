"""Gradient accumulation, against sums made by hand."""

import math

import pytest
import torch
from torch import nn

import forewarn.measure.probes.gradients as gradients_module
from forewarn.measure.engine.norms import NormReader
from tests.conftest import last
from tests.test_no_host_sync import Counting


class Slope(nn.Module):
    """A loss of a parameter and a batch whose gradient is the batch itself."""

    def __init__(self, size=3):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))

    def forward(self, x):
        return (self.weight * x).sum()


def train(monitor, model, optimizer, batches, clip=None, set_to_none=True):
    """One optimizer step over these micro-batches."""
    for batch in batches:
        loss = model(torch.as_tensor(batch, dtype=torch.float32))
        loss.backward()
    if clip:
        monitor.clip_grad_norm_(clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=set_to_none)
    monitor.step(loss)


@pytest.fixture
def slope(watch):
    model = Slope()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return watch(model, optimizer), model, optimizer


AGREE = [[3.0, 4.0, 0.0]] * 4
ACROSS = [[5.0, 0.0, 0.0], [0.0, 5.0, 0.0], [0.0, 0.0, 5.0]]
UNEVEN = [[3.0, 4.0, 0.0], [0.0, 4.0, 0.0]]


@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize(("batches", "growth"), [(AGREE, 4.0), (ACROSS, math.sqrt(3)), (UNEVEN, math.hypot(3, 8) / 5)])
def test_the_norm_grows_by_k_where_micro_batches_agree_and_by_its_root_where_they_do_not(
    slope, batches, growth, set_to_none, clip
):
    monitor, *loop = slope
    for _ in range(3):
        train(monitor, *loop, batches, clip, set_to_none)
    assert last(monitor, "gradient/backward_passes") == len(batches)
    assert last(monitor, "gradient/accumulation_growth") == pytest.approx(growth, rel=1e-6)


@pytest.mark.parametrize("clip", [None, 0.1])
def test_one_pass_per_step_is_one_pass_and_has_no_growth(slope, clip):
    monitor, *loop = slope
    for _ in range(3):
        train(monitor, *loop, AGREE[:1], clip)
    assert last(monitor, "gradient/backward_passes") == 1
    assert "gradient/accumulation_growth" not in monitor.history


@pytest.mark.parametrize(("num_passes", "reads"), [(1, 0), (4, 1)])
def test_where_the_loop_clips_only_accumulation_costs_a_read_of_the_gradients(slope, monkeypatch, num_passes, reads):
    monitor, *loop = slope
    for _ in range(2):
        train(monitor, *loop, AGREE[:num_passes], 1.0)
    read = []
    of_some, of_all = gradients_module.norms, NormReader.__call__
    monkeypatch.setattr(gradients_module, "norms", lambda tensors: read.append(len(tensors)) or of_some(tensors))
    monkeypatch.setattr(NormReader, "__call__", lambda own, tensors: read.append(len(tensors)) or of_all(own, tensors))
    train(monitor, *loop, AGREE[:num_passes], 1.0)
    residuals = num_passes - 1  # what is left in the gradients is looked at as each pass begins that finds any
    assert len(read) == residuals + reads


def test_nothing_is_counted_on_steps_that_are_not_measured(watch):
    model = Slope()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = watch(model, optimizer, every=lambda step: step == 1, config={"escalation_steps": 0})
    for _ in range(3):
        train(monitor, model, optimizer, UNEVEN)
    assert monitor.history.series("gradient/backward_passes").steps.tolist() == [1]
    assert monitor.history.series("gradient/accumulation_growth").steps.tolist() == [1]


def test_a_forgotten_zero_grad_is_no_accumulation(slope):
    monitor, model, optimizer = slope
    for _ in range(4):
        loss = model(torch.ones(3))
        loss.backward()
        optimizer.step()
        monitor.step(loss)
    assert last(monitor, "gradient/backward_passes") == 1
    assert "gradient/accumulation_growth" not in monitor.history


def test_with_gradients_left_from_the_step_before_passes_are_counted_but_not_compared(slope):
    monitor, model, optimizer = slope
    for _ in range(3):
        for _ in range(2):
            loss = model(torch.ones(3))
            loss.backward()
        optimizer.step()
        monitor.step(loss)
    assert last(monitor, "gradient/backward_passes") == 2
    assert monitor.history.series("gradient/accumulation_growth").steps.tolist() == [0]


@pytest.mark.parametrize("set_to_none", [True, False])
def test_the_passes_of_a_closure_that_clears_its_gradients_do_not_add_up(watch, set_to_none):
    model = Slope()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    monitor = watch(model, optimizer)

    def closure():
        optimizer.zero_grad(set_to_none=set_to_none)
        loss = (model(torch.ones(3)) - 1).square()
        loss.backward()
        return loss

    for _ in range(3):
        monitor.step(optimizer.step(closure))
    assert last(monitor, "gradient/backward_passes") == 1
    assert "gradient/accumulation_growth" not in monitor.history


def test_two_optimizers_with_a_pass_each_do_not_accumulate(watch):
    model = nn.ModuleDict({"g": nn.Linear(3, 3), "d": nn.Linear(3, 1)})
    model.forward = lambda x: model["d"](model["g"](x)).mean()
    optimizers = [torch.optim.SGD(model[name].parameters(), lr=0.01) for name in "dg"]
    monitor = watch(model, optimizers)
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
            loss = model(torch.ones(4, 3))
            loss.backward()
            optimizer.step()
        monitor.step(loss)
    assert last(monitor, "gradient/backward_passes") == 1
    assert "gradient/accumulation_growth" not in monitor.history


def test_two_optimizers_that_use_the_same_passes_are_compared_together(watch):
    model = nn.ModuleDict({"one": Slope(), "two": Slope()})
    model.forward = lambda x: model["one"](x) + model["two"](2 * x)
    optimizers = [torch.optim.SGD(model[name].parameters(), lr=0.01) for name in ("one", "two")]
    monitor = watch(model, optimizers)
    for _ in range(2):
        for batch in UNEVEN:
            loss = model(torch.tensor(batch))
            loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        monitor.step(loss)
    assert last(monitor, "gradient/backward_passes") == 2
    assert last(monitor, "gradient/accumulation_growth") == pytest.approx(math.hypot(3, 8) / 5, rel=1e-6)


def test_a_gradient_that_no_optimizer_clears_is_not_compared(watch):
    model = nn.ModuleDict({"one": Slope(), "two": Slope()})
    model.forward = lambda x: model["one"](x) + model["two"](x)
    optimizer = torch.optim.SGD(model["one"].parameters(), lr=0.01)
    monitor = watch(model, optimizer)
    for _ in range(3):
        train(monitor, model, optimizer, UNEVEN, clip=1.0)
    assert last(monitor, "gradient/backward_passes") == 2
    assert "gradient/accumulation_growth" not in monitor.history


def test_what_was_clipped_between_two_passes_is_not_compared(slope):
    monitor, model, optimizer = slope
    for _ in range(3):
        for batch in UNEVEN:
            loss = model(torch.tensor(batch))
            loss.backward()
            monitor.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        monitor.step(loss)
    assert last(monitor, "gradient/backward_passes") == 2
    assert "gradient/accumulation_growth" not in monitor.history


@pytest.mark.parametrize("declared", [True, False])
@pytest.mark.parametrize("clip", [True, False])
def test_under_a_gradient_scaler_both_norms_are_unscaled(watch, declared, clip):
    model = Slope()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    monitor = watch(model, optimizer, scaler=scaler if declared else None)
    for _ in range(6):
        for batch in UNEVEN:
            loss = model(torch.tensor(batch))
            scaler.scale(loss).backward()
        if clip:
            scaler.unscale_(optimizer)
            monitor.clip_grad_norm_(1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        monitor.step(loss)
    growth = monitor.history.series("gradient/accumulation_growth").values
    assert len(growth) >= 4
    assert growth == pytest.approx([math.hypot(3, 8) / 5] * len(growth), rel=1e-5)


def test_that_a_run_accumulates_survives_a_resume(slope, watch):
    monitor, model, optimizer = slope
    train(monitor, model, optimizer, UNEVEN, 1.0)
    state = monitor.state_dict()
    monitor.close()
    again = watch(model, optimizer)
    again.load_state_dict(state)
    assert again._probes["gradients"]._accumulation.expected


@pytest.mark.parametrize("clip", [None, 1.0])
def test_nothing_is_waited_for(slope, clip):
    monitor, *loop = slope
    train(monitor, *loop, UNEVEN, clip)
    with Counting() as counting:
        train(monitor, *loop, UNEVEN, clip)
    assert counting.syncs == 0
    assert last(monitor, "gradient/accumulation_growth") > 1
