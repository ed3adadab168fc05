"""Comparing with a reference model."""

import copy
import logging

import pytest
import torch
from torch import nn

from forewarn import ModuleMonitor


@pytest.fixture
def pair():
    """A model, a reference of other weights, and a monitor that compares them."""
    torch.manual_seed(0)
    model, reference = (nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)) for _ in range(2))
    monitor = ModuleMonitor(lambda step: True)
    monitor.set_module(model)
    monitor.set_reference_module(reference)
    monitor.add_activation_difference_metric("norm", lambda x, y: (x - y).norm(dim=-1))
    monitor.add_parameter_difference_metric("norm", lambda p, q: (p - q).norm())
    return model, reference, monitor


@pytest.mark.parametrize("within", [True, False])
@pytest.mark.parametrize("release", [True, False])
def test_the_reference_may_run_within_no_monitor_or_not(pair, within, release):
    model, reference, monitor = pair
    inputs = [torch.randn(3, 4), torch.randn(5, 4)]
    monitor.begin_step(0)
    for x in inputs:
        if within:
            with monitor.no_monitor(), torch.no_grad():
                reference(x)
        else:
            reference(x)
        model(x)
        if release:
            monitor.after_micro_batch()
    monitor.monitor_parameters()
    monitor.end_step()
    found = monitor.get_step_metrics()
    x = torch.cat(inputs)
    for module, depth in (("0", 1), ("1", 2), ("2", 3), ("[root module]", 3)):
        true = (model[:depth](x) - reference[:depth](x)).norm(dim=-1).mean().item()
        assert found[f"activation_difference/{module}/norm"] == pytest.approx(true, rel=1e-5)
    true = (model[0].weight - reference[0].weight).norm().item()
    assert found["parameter_difference/0.weight/norm"] == pytest.approx(true, rel=1e-5)
    assert len(found) == 4 + 4


def test_a_module_that_is_called_several_times_is_compared_call_by_call():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            return self.layer(self.layer(x))

    torch.manual_seed(0)
    model, reference, x = Shared(), Shared(), torch.randn(3, 4)
    monitor = ModuleMonitor(lambda step: True)
    monitor.set_module(model)
    monitor.set_reference_module(reference)
    monitor.add_activation_difference_metric("norm", lambda a, b: (a - b).norm(), "layer")
    monitor.begin_step(0)
    reference(x)
    model(x)
    monitor.end_step()
    calls = [(model.layer(x), reference.layer(x)), (model(x), reference(x))]
    true = sum((a - b).norm().item() for a, b in calls) / 2
    assert monitor.get_step_metrics() == pytest.approx({"activation_difference/layer/norm": true})


def test_a_missing_forward_of_the_reference_is_said_and_nothing_else_is_lost(pair, caplog):
    model, _, monitor = pair
    monitor.add_activation_metric("mean", lambda x: x.mean(), "0")
    monitor.begin_step(0)
    with caplog.at_level(logging.WARNING, logger="forewarn"):
        model(torch.ones(1, 4))
    monitor.end_step()
    assert "run the reference before the monitored module" in caplog.text
    assert list(monitor.get_step_metrics()) == ["activation/0/mean"]


def test_after_the_micro_batch_nothing_of_the_reference_is_kept(pair):
    _, reference, monitor = pair
    monitor.begin_step(0)
    reference(torch.ones(1, 4))
    assert monitor.reference.kept
    monitor.after_micro_batch()
    assert not monitor.reference.kept
    with monitor.ignoring_reference():
        reference(torch.ones(1, 4))
    assert not monitor.reference.kept


def test_a_reference_can_be_replaced_and_removed_and_must_look_alike(pair):
    model, reference, monitor = pair
    other = copy.deepcopy(model)
    monitor.begin_step(0)
    monitor.set_reference_module(other)
    assert monitor.reference_module is other
    assert not reference[0]._forward_hooks
    assert other[0]._forward_hooks
    with pytest.raises(ValueError, match="same structure as the monitored module, but only one of them has 2"):
        monitor.set_reference_module(nn.Sequential(nn.Linear(4, 8), nn.Tanh()))
    assert not monitor.has_reference_module()
    monitor.set_reference_module(other)
    monitor.set_reference_module(None)
    assert not monitor.has_reference_module()
    assert not other[0]._forward_hooks


def test_reference_activations_may_be_kept_in_host_memory():
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    monitor = ModuleMonitor(lambda step: True, cpu_offload=True)
    monitor.set_module(model)
    monitor.set_reference_module(copy.deepcopy(model))
    monitor.add_activation_difference_metric("norm", lambda x, y: (x - y).norm())
    monitor.begin_step(0)
    monitor.reference_module(torch.ones(1, 4))
    model(torch.ones(1, 4))
    monitor.end_step()
    assert monitor.get_step_metrics() == {"activation_difference/[root module]/norm": 0.0}
