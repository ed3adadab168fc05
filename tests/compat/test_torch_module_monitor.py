"""The public package's paths lead to the same names here."""

import importlib
import inspect

import pytest
import torch

import forewarn
from forewarn.compat import torch_module_monitor as ours

public = pytest.importorskip("torch_module_monitor")

PATHS = {
    "monitor": ("ModuleMonitor", "MonitorMixin", "default_format_module_name_fn"),
    "storage": ("StorageManager",),
    "hooks": ("HooksManager",),
    "attention": ("monitor_scaled_dot_product_attention",),
    "refined_coordinate_check": ("RefinedCoordinateCheck", "l2_norm"),
}


@pytest.mark.parametrize("path", PATHS)
def test_every_public_name_is_found_under_the_same_path_and_takes_the_same_arguments(path):
    for name in PATHS[path]:
        theirs = getattr(importlib.import_module(f"torch_module_monitor.{path}"), name)
        mine = getattr(importlib.import_module(f"forewarn.compat.torch_module_monitor.{path}"), name)
        if inspect.isfunction(theirs):
            assert set(inspect.signature(theirs).parameters) <= set(inspect.signature(mine).parameters)
        else:
            members = [each for each in dir(theirs) if not each.startswith("_")]
            written = {"aggregate_step", "log_tensor"} if name == "StorageManager" else set()  # how it fills itself
            assert set(members) - written <= set(dir(mine))
    assert all(hasattr(ours, name) for name in dir(public) if name[0].isupper() or name.startswith("monitor_"))


def test_the_constructor_and_the_loop_take_the_same_arguments():
    for name in ("__init__", "begin_step", "log_scalar", "log_scalars", "log_tensor", "monitor_activations"):
        theirs = inspect.signature(getattr(public.ModuleMonitor, name)).parameters
        mine = inspect.signature(getattr(ours.ModuleMonitor, name)).parameters
        assert list(theirs) == list(mine)[: len(theirs)], name
    theirs, mine = (inspect.signature(each.ModuleMonitor.__init__).parameters for each in (public, ours))
    for name in ("excluded_modules_regex", "logger", "cpu_offload"):
        assert theirs[name].default == mine[name].default


def test_metrics_may_be_added_by_the_public_keywords(small):
    model, _ = small
    monitor = ours.ModuleMonitor(monitor_step_fn=lambda step: True)
    monitor.set_module(model)
    for kind in ("activation", "activation_difference"):
        add = getattr(monitor, f"add_{kind}_metric")
        add(
            metric_name="norm",
            metric_fn=lambda *x: x[0].norm(),
            metric_regex="0",
            metric_aggregation_fn=lambda v: v.max(),
        )
    for kind in ("parameter", "parameter_difference", "gradient"):
        add = getattr(monitor, f"add_{kind}_metric")
        add(metric_name="norm", metric_fn=lambda *x: x[0].norm(), metric_regex=r"0\.weight")
    monitor.begin_step(0)
    model(torch.ones(2, 4)).sum().backward()
    monitor.monitor_gradients()
    monitor.monitor_parameters()
    monitor.end_step()
    assert set(monitor.get_step_metrics()) == {"activation/0/norm", "gradient/0.weight/norm", "parameter/0.weight/norm"}
    assert isinstance(monitor, forewarn.ModuleMonitor)


def test_hooks_are_managed_one_per_module(small):
    model, _ = small
    seen = []
    with ours.HooksManager() as hooks:
        hooks.register_forward_hook(model[0], lambda *what: seen.append("first"))
        hooks.register_forward_hook(model[0], lambda *what: seen.append("second"))
        hooks.register_forward_hook(model[1], lambda *what: seen.append("other"))
        assert len(hooks) == 2
        hooks.remove_hook(model[1])
        model(torch.ones(1, 4))
        assert seen == ["second"]
    assert not model[0]._forward_hooks
