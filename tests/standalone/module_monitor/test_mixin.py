"""Modules that log from inside their own forward."""

import copy

import pytest
import torch
from torch import nn

from forewarn import ModuleMonitor, MonitorMixin


class Logging:
    def build(self):
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        output = self.layer(x)
        if self.is_monitoring:
            monitor = self.get_module_monitor()
            monitor.log_tensor("row_norm", output.norm(dim=-1))
            monitor.monitor_activations("inside", output, is_reference=self.is_reference_module)
        return output


class After(Logging, nn.Module, MonitorMixin):
    def __init__(self):
        super().__init__()
        self.build()


class Before(Logging, MonitorMixin, nn.Module):
    def __init__(self):
        super().__init__()
        self.build()


class Called(Logging, nn.Module, MonitorMixin):
    def __init__(self):
        nn.Module.__init__(self)
        MonitorMixin.__init__(self)
        self.build()


@pytest.mark.parametrize("kind", [After, Before, Called])
@pytest.mark.parametrize("within", [True, False])
def test_a_module_logs_from_its_forward_and_its_reference_only_lends_activations(kind, within):
    torch.manual_seed(0)
    model, reference = nn.Sequential(kind()), nn.Sequential(kind())
    x = torch.randn(3, 4)
    assert not model[0].is_monitoring
    monitor = ModuleMonitor(lambda step: True)
    monitor.set_module(model)
    monitor.set_reference_module(reference)
    monitor.add_activation_difference_metric("norm", lambda a, b: (a - b).norm(), "inside")
    assert model[0].get_module_monitor() is model[0].module_monitor is monitor
    assert reference[0].get_module_monitor() is monitor
    assert not model[0].is_reference_module
    assert reference[0].is_reference_module
    monitor.begin_step(0)
    if within:
        with monitor.no_monitor():
            assert not model[0].is_monitoring
            reference(x)
    else:
        reference(x)
    assert model[0].is_monitoring
    model(x)
    monitor.end_step()
    assert not model[0].is_monitoring
    assert monitor.get_step_metrics() == pytest.approx(
        {
            "row_norm": model(x).norm(dim=-1).mean().item(),
            "activation_difference/inside/norm": (model(x) - reference(x)).norm().item(),
        }
    )
    monitor.close()
    assert model[0].get_module_monitor() is None
    assert reference[0].get_module_monitor() is None


def test_a_copy_of_a_monitored_module_has_no_monitor():
    model = nn.Sequential(After())
    monitor = ModuleMonitor(lambda step: True)
    monitor.set_module(model)
    monitor.begin_step(0)
    twin = copy.deepcopy(model)
    assert model[0].is_monitoring
    assert not twin[0].is_monitoring
    assert twin[0].get_module_monitor() is None
    assert list(model.state_dict()) == ["0.layer.weight", "0.layer.bias"]


def test_a_module_is_known_by_itself_whether_it_is_the_reference(small):
    model, _ = small
    reference = copy.deepcopy(model)
    monitor = ModuleMonitor(lambda step: True)
    monitor.set_module(model)
    monitor.set_reference_module(reference)
    assert monitor.name_of(model) == ("[root module]", False)
    assert monitor.name_of(reference[1]) == ("1", True)
    assert monitor.name_of("anything") == ("anything", False)
    with pytest.raises(ValueError, match="this Linear is not part of the monitored module"):
        monitor.name_of(nn.Linear(1, 1))
