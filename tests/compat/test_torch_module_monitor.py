"""Everything public in torch-module-monitor is found here under the same path, and reads the same."""

import gc
import importlib
import inspect
import pkgutil
import re
from collections.abc import Mapping

import pytest
import torch

import forewarn
from forewarn.compat import torch_module_monitor as ours

public = pytest.importorskip("torch_module_monitor")


def surface(path):
    """Every public name that a module of torch-module-monitor defines itself, and all those of the package."""
    module = importlib.import_module(f"torch_module_monitor{path}")
    return [
        name
        for name, value in vars(module).items()
        if name in ("__all__", "__version__")
        or (not name.startswith("_") and path in ("", getattr(value, "__module__", "").removeprefix(public.__name__)))
    ]


PATHS = ["", *(f".{each.name}" for each in pkgutil.iter_modules(public.__path__))]


def objects(package):
    """One object of each public class, in use on a monitored step."""
    model, reference = (
        torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU()),
        torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU()),
    )
    monitor = package.ModuleMonitor(lambda step: True)
    monitor.set_module(model)
    monitor.set_reference_module(reference)
    made = [monitor, package.RefinedCoordinateCheck(monitor), package.StorageManager(), package.HooksManager()]
    return {type(each).__name__: each for each in [*made, package.MonitorMixin()]}


def same_arguments(theirs, mine):
    """Every call that their function takes is one that ours takes: names, order and which have a default."""
    ours_by_name = inspect.signature(mine).parameters
    for place, (name, parameter) in enumerate(inspect.signature(theirs).parameters.items()):
        assert list(ours_by_name)[place] == name, (theirs, name)
        assert ours_by_name[name].kind == parameter.kind, (theirs, name)
        optional = parameter.default is not parameter.empty
        assert not optional or ours_by_name[name].default is not parameter.empty, (theirs, name)
        if not callable(parameter.default):
            assert not optional or ours_by_name[name].default == parameter.default, (theirs, name)
    extra = list(ours_by_name.values())[len(inspect.signature(theirs).parameters) :]
    assert all(each.default is not each.empty or each.kind in (each.VAR_KEYWORD, each.VAR_POSITIONAL) for each in extra)


@pytest.mark.parametrize("path", PATHS)
def test_every_public_name_is_found_under_the_same_path_and_takes_the_same_arguments(path):
    assert surface(path)
    for name in surface(path):
        theirs = getattr(importlib.import_module(f"torch_module_monitor{path}"), name)
        mine = getattr(importlib.import_module(f"forewarn.compat.torch_module_monitor{path}"), name)
        if inspect.isfunction(theirs):
            same_arguments(theirs, mine)
        elif inspect.isclass(theirs):
            same_arguments(theirs, mine)
            for member, value in vars(theirs).items():
                if inspect.isfunction(value) and not member.startswith("_"):
                    same_arguments(value, getattr(mine, member))
                elif isinstance(value, property):
                    assert isinstance(inspect.getattr_static(mine, member), property), member


@pytest.mark.parametrize("name", ["ModuleMonitor", "RefinedCoordinateCheck", "StorageManager", "HooksManager"])
def test_every_attribute_and_method_of_an_object_is_there(name):
    theirs, mine = objects(public)[name], objects(ours)[name]
    members = [member for member in dir(theirs) if not member.startswith("_")]
    assert set(vars(theirs)) & set(members), "attributes that only the constructor makes are compared too"
    for member in members:
        assert hasattr(mine, member), member
        assert callable(getattr(mine, member)) == callable(getattr(theirs, member)), member
        if isinstance(getattr(theirs, member), dict):
            assert isinstance(getattr(mine, member), Mapping), member


def test_a_module_that_logs_itself_has_the_same_attributes():
    theirs, mine = objects(public)["MonitorMixin"], objects(ours)["MonitorMixin"]
    for member in (each for each in dir(theirs) if not each.startswith("_")):
        assert hasattr(mine, member), member
    for member in ("module_monitor", "is_reference_module", "is_monitoring"):
        assert getattr(mine, member) == getattr(theirs, member), member


def run_step(package, order=("reference", "model")):
    """A monitored step with metrics of every kind, stopped before its end."""
    torch.manual_seed(0)
    models = {side: torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU()) for side in ("model", "reference")}
    monitor = package.ModuleMonitor(lambda step: step != 1, excluded_modules_regex="1")
    monitor.set_module(models["model"])
    monitor.set_reference_module(models["reference"])
    for kind in ("activation", "activation_difference", "parameter", "parameter_difference", "gradient"):
        getattr(monitor, f"add_{kind}_metric")("norm", torch.sub if "difference" in kind else torch.norm, "0")
    monitor.begin_step(0)
    for side in order:
        models[side](torch.ones(2, 4))
    return monitor, models


def test_the_state_of_a_step_reads_the_same():
    (theirs, _), (mine, my_models) = run_step(public), run_step(ours)
    names = {side: dict(model.named_modules()) for side, model in my_models.items()}
    assert {mine.module_names[module] for module in names["model"].values()} == set(theirs.module_names.values())
    assert list(mine.module_names.values()) == list(theirs.module_names.values()) == ["[root module]", "0", "1"]
    assert list(mine.reference_module_names) == list(names["reference"].values())
    assert mine.excluded_modules_compiled_re.pattern == theirs.excluded_modules_compiled_re.pattern
    for kind in ("activation", "activation_difference", "parameter", "parameter_difference", "gradient"):
        assert getattr(mine, f"{kind}_metrics") == getattr(theirs, f"{kind}_metrics"), kind
    assert torch.equal(mine.reference_module_activations["0"], theirs.reference_module_activations["0"])
    for hooks in ("activation_hooks", "reference_activation_hooks"):
        assert len(getattr(mine, hooks)) == len(getattr(theirs, hooks)) == 2, "all but the excluded module"
    for monitor in (theirs, mine):
        assert monitor.current_step_monitored
        assert monitor.within_monitoring_window
        with monitor.no_monitor():
            assert monitor.current_step_monitored
            assert not monitor.within_monitoring_window
        assert not monitor.ignore_reference_module_activations
        monitor.end_step()
        assert not monitor.current_step_monitored
        assert not monitor.within_monitoring_window
        assert not monitor.reference_module_activations
        monitor.begin_step(1)
        assert not monitor.current_step_monitored
        monitor.begin_step(2)
        monitor.ignore_reference_module_activations = True
        monitor.reference_module(torch.ones(2, 4))
        assert monitor.ignore_reference_module_activations
        assert not monitor.reference_module_activations
        monitor.remove_reference_module()
        assert not monitor.reference_module_names
        assert len(monitor.reference_activation_hooks) == 0


def test_reading_the_hooks_leaves_them_in_place():
    monitor, models = run_step(ours)
    hooks = monitor.activation_hooks
    del hooks
    gc.collect()
    models["model"](torch.ones(2, 4))
    monitor.end_step()
    assert "activation/0/norm" in monitor.get_step_metrics()


def test_the_coordinate_check_has_the_models_and_the_tensors_that_wait_for_the_other_side():
    monitor = run_step(ours, order=())[0]
    check = ours.RefinedCoordinateCheck(monitor)
    assert check.monitor is monitor
    assert check.logger is monitor.logger
    assert check.module is monitor.module
    assert check.reference_module is monitor.reference_module
    assert len(check.rcc_forward_hooks) == len(check.rcc_reference_forward_hooks) == 1, "not the root, not the excluded"
    monitor.reference_module(torch.ones(2, 4))
    assert torch.equal(check.reference_module_inputs["0"][0], torch.ones(2, 4))
    monitor.module(torch.ones(2, 4))
    assert not {*check.reference_module_inputs, *check.module_inputs}, "measured, so released"
    output = monitor.module(torch.zeros(2, 4))
    assert torch.equal(check.module_inputs["0"][0], torch.zeros(2, 4))
    assert torch.equal(check.module_outputs["0"].relu(), output)


def failing_calls(package):
    """What a user may do wrong, by name."""
    empty, started = package.ModuleMonitor(lambda step: True), package.ModuleMonitor(lambda step: True)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3))
    started.set_module(model)
    started.begin_step(3)
    started.add_gradient_metric("norm", torch.norm)
    storage = package.StorageManager()
    storage.create_step_entry(0)
    unused = run_step(package, order=())[0]
    check = package.RefinedCoordinateCheck(unused)
    return {
        "no module": lambda: package.RefinedCoordinateCheck(empty),
        "no reference": lambda: package.RefinedCoordinateCheck(started),
        "no forward": check.refined_coordinate_check,
        "module twice": lambda: started.set_module(model),
        "module is None": lambda: empty.set_module(None),
        "reference first": lambda: empty.set_reference_module(model),
        "another structure": lambda: started.set_reference_module(torch.nn.Linear(2, 2)),
        "step without module": lambda: empty.begin_step(0),
        "step back": lambda: started.begin_step(2),
        "metric twice": lambda: started.add_gradient_metric("norm", torch.norm),
        "load over metrics": lambda: storage.load_metrics({}),
    }


@pytest.mark.parametrize("mistake", list(failing_calls(ours)))
def test_an_error_begins_with_the_words_that_users_of_the_package_match(mistake):
    errors = []
    for package in (public, ours):
        with pytest.raises(ValueError, match=r"\w") as raised:
            failing_calls(package)[mistake]()
        errors.append(str(raised.value))
    clause = re.split(r"[.!(]| before setting up| already stored", errors[0])[0].strip()
    assert errors[1].startswith(clause), errors


def test_storage_aggregates_what_was_logged_several_times():
    storages = [package.StorageManager() for package in (public, ours)]
    for storage in storages:
        for value in (1.0, torch.tensor(2.0), 4):
            storage.log_scalar(0, "loss", value)
            storage.log_scalar(0, "worst", value, aggregation_fn=max)
        storage.log_scalar(0, "once", 3.0)
        for tensor in (torch.ones(2, 2), torch.zeros(1)):
            storage.log_tensor(0, "norm", tensor)
            storage.log_tensor(
                0, "both", tensor, lambda values: {"": values.sum().item(), "[max]": values.max().item()}
            )
            storage.log_tensor(0, "split", tensor, lambda values: {"[min]": values.min().item()})
    assert str(storages[0].get_all_metrics()) == str(storages[1].get_all_metrics())
    for storage in storages:
        storage.aggregate_step(0)
        storage.aggregate_step(7)
    assert storages[0].get_all_metrics() == storages[1].get_all_metrics()
    assert storages[1].get_step_metrics(0)["norm"] == pytest.approx(0.8)
    with pytest.raises(ValueError, match="number"):
        storages[1].log_scalar(0, "loss", "high")
    assert isinstance(ours.ModuleMonitor().storage, ours.StorageManager)


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


def test_hooks_go_with_their_manager(small):
    model, _ = small
    hooks = ours.HooksManager()
    hooks.register_forward_hook(model[0], lambda *what: None)
    del hooks
    gc.collect()
    assert not model[0]._forward_hooks
