"""Models that resist being watched, and interrupts: training goes on, what is lost is said, nothing stays behind."""

from __future__ import annotations

import signal
import sys
import time

import pytest
import torch
from torch import nn
from torch.nn import functional

import forewarn
from forewarn.measure.hooks import Hook, own_pass
from tests.conftest import last


class OldSignature(nn.Linear):
    def register_forward_hook(self, hook):
        return super().register_forward_hook(hook)

    def register_forward_pre_hook(self, hook):
        return super().register_forward_pre_hook(hook)


class Refusing(nn.Linear):
    def register_forward_hook(self, *args, **kwargs):
        raise PermissionError("no hooks here")

    register_forward_pre_hook = register_forward_hook


class NoHandle(nn.Linear):
    """Takes the hook and returns nothing to remove it by."""

    def register_forward_hook(self, *args, **kwargs):
        super().register_forward_hook(*args, **kwargs)

    def register_forward_pre_hook(self, *args, **kwargs):
        super().register_forward_pre_hook(*args, **kwargs)


def trained(model, monitor=None, optimizer=None, steps=3):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(steps):
        loss = model(torch.ones(2, 3)).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if monitor is not None:
            monitor.step(loss)
    return [parameter.detach().clone() for parameter in model.parameters()]


def hooks_on(model):
    return [held for module in model.modules() for name, held in vars(module).items() if "hooks" in name and held]


@pytest.mark.parametrize("kind", [OldSignature, Refusing])
def test_a_module_that_refuses_hooks_is_left_out_and_the_rest_is_measured(kind, watch, caplog):
    def made():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4), kind(4, 4), nn.Tanh(), nn.Linear(4, 2))

    model = made()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = watch(model, optimizer)
    weights = trained(model, monitor, optimizer)
    assert all(map(torch.equal, weights, trained(made())))
    assert len(monitor.history.series("activation/mean", "0")) == 3
    assert len(monitor.history.series("activation/mean", "3")) == 3
    alerts = {alert.scope: alert for alert in monitor.alerts if alert.code == "X103"}
    assert "refuses hooks" in str(forewarn.Reason(int(last(monitor, "monitor/unavailable", "activation/mean"))))
    assert "activation/mean" in alerts
    assert caplog.text.count(f"{kind.__name__} refuses hooks") == 1
    assert monitor._loop.failures == {}
    monitor.close()
    assert hooks_on(model) == []


def test_a_hook_whose_handle_is_kept_from_us_is_removed_all_the_same(watch):
    model = nn.Sequential(NoHandle(3, 3), NoHandle(3, 1))
    monitor = watch(model, torch.optim.SGD(model.parameters(), 0.1), every=lambda step: step < 2)
    trained(model, monitor)
    assert hooks_on(model[0]) == []
    assert len(monitor.history.series("activation/mean", "0")) == 2
    monitor.close()
    assert hooks_on(model) == []


def test_a_root_that_refuses_hooks_is_watched_without_them(watch):
    model = Refusing(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = watch(model, optimizer)
    trained(model, monitor, optimizer)
    assert len(monitor.history.series("train/loss")) == 3
    assert len(monitor.history.series("update/ratio", "weight")) == 3
    assert [alert.scope for alert in monitor.alerts if alert.code == "X101"] == ["hooks"]


def awkward(name, error):
    """A class of models one of whose special methods raises, except where torch itself relies on it."""

    def raising(self, *args, **kwargs):
        raise error

    class Awkward(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))

        def forward(self, x):
            return vars(self)["_modules"]["inner"](x)

    if name == "__getattribute__":
        expected = {*dir(nn.Module), *vars(Awkward()), "forward"}

        def raising(self, attribute):
            if attribute not in expected:
                raise error
            return object.__getattribute__(self, attribute)

    setattr(Awkward, name, raising)
    return Awkward


@pytest.mark.parametrize(
    "error", [RuntimeError("no"), KeyError("no"), AttributeError("no"), ZeroDivisionError()], ids=repr
)
@pytest.mark.parametrize(
    "name",
    [
        "__getattr__", "__getattribute__", "named_modules", "modules", "named_parameters", "named_children", "children",
        "__len__", "__eq__", "__hash__", "__bool__", "__repr__", "__iter__", "__contains__", "__dir__",
    ],
)  # fmt: skip
def test_a_root_whose_methods_raise_is_watched(name, error, watch):
    torch.manual_seed(0)
    model = awkward(name, error)()
    optimizer = torch.optim.SGD(vars(model)["_modules"]["inner"].parameters(), 0.1)
    monitor = watch(model, optimizer)
    for _ in range(3):
        loss = model(torch.ones(2, 3)).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        monitor.step(loss)
    assert len([alert for alert in monitor.alerts if alert.code == "X101"]) <= 1
    assert len(monitor.history.series("train/loss")) == 3
    assert len(monitor.history.series("gradient/norm", "inner.0.weight")) == 3
    monitor.close()
    assert not vars(model)["_forward_hooks"]


def test_a_model_that_cannot_be_read_at_all_is_one_alert(watch, monkeypatch):
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    first = forewarn.measure.parameters.ParameterIndex._take
    failures = iter([RuntimeError("unreadable")])

    def take(index):
        for error in failures:
            raise error
        first(index)

    monkeypatch.setattr(forewarn.measure.parameters.ParameterIndex, "_take", take)
    metric = forewarn.ActivationMetric("mean")
    config = forewarn.Config(measure=forewarn.Measure(blocks="weight", router="gate"))
    monitor = watch(model, optimizer, metrics=[metric], config=config)
    trained(model, monitor, optimizer)
    assert [alert.scope for alert in monitor.alerts if alert.code == "X101"] == ["model"]
    assert len(monitor.history.series("train/loss")) == 3


def test_a_schedule_that_raises_is_one_alert_and_its_step_is_still_told(watch):
    def every(step):
        if step:
            raise ZeroDivisionError
        return True

    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = watch(model, optimizer, every=every)
    trained(model, monitor, optimizer)
    assert len(monitor.history.series("train/loss")) == 3
    assert [alert.scope for alert in monitor.alerts if alert.code == "X101"] == ["monitor"]


def test_a_state_that_cannot_be_saved_is_no_error_and_starts_anew(watch, monkeypatch, caplog):
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = watch(model, optimizer)
    trained(model, monitor, optimizer)
    monkeypatch.setattr(type(monitor.history), "state_dict", lambda history: 1 / 0)
    state = monitor.state_dict()
    other = watch(model, optimizer)
    other.load_state_dict(state)
    assert other.at == 3
    assert "starts from scratch" in caplog.text


def test_a_real_interrupt_leaves_no_hook_behind(watch, monkeypatch):
    unraisable = []  # an interrupt in a destructor or a weak reference's callback: Python itself lets no one catch it
    monkeypatch.setattr(sys, "unraisablehook", lambda told: unraisable.append(told.exc_type))
    model = nn.Sequential(*[nn.Linear(3, 3) for _ in range(40)])
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    monitor = watch(model, optimizer)
    arrived = 0
    previous = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        for number in range(30):
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            torch.set_grad_enabled(True)  # torch's own no_grad() leaves it off if it is interrupted on the way out
            signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.001 + 0.0007 * number)
                started = time.monotonic()
                while time.monotonic() < started + 5:
                    trained(model, monitor, optimizer, steps=1)
            except KeyboardInterrupt:
                arrived += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGINT, previous)
    assert arrived + unraisable.count(KeyboardInterrupt) == 30
    monitor.close()
    assert hooks_on(model) == []
    assert not any(parameter._backward_hooks for parameter in model.parameters())


def test_an_interrupt_while_closing_still_closes_the_rest(watch, tmp_path):
    class Slow:
        closed = 0

        def show(self, step, blocks, changed, taken): ...

        def close(self):
            self.closed += 1
            raise KeyboardInterrupt

    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    view = Slow()
    monitor = watch(model, optimizer, views=[view], run=tmp_path / "interrupted")
    trained(model, monitor, optimizer)
    with pytest.raises(KeyboardInterrupt):
        monitor.close()
    assert hooks_on(model) == []
    assert forewarn.open_run(tmp_path / "interrupted").last_step == 2
    monitor.close()
    assert view.closed == 1


def test_tensors_that_outlive_the_monitor_tell_it_nothing(watch):
    model = nn.Linear(3, 1)
    monitor = watch(model, torch.optim.SGD(model.parameters(), 0.1))
    output = model(torch.ones(2, 3))
    monitor.close()
    output.sum().backward()
    assert monitor._probes["gradients"]._latest == {}
    assert not model.weight._backward_hooks


def test_an_interrupted_pass_of_our_own_does_not_deafen_the_hooks(watch):
    seen = []
    hook = Hook(seen.append)
    passing = own_pass()
    passing.__enter__()  # and never left
    hook(1)
    assert seen == []
    model = nn.Linear(3, 1)
    monitor = watch(model, torch.optim.SGD(model.parameters(), 0.1))
    monitor.step(1.0)
    hook(2)
    assert seen == [2]
    del passing


def test_attention_that_is_interrupted_while_it_is_replaced_is_put_back(watch):
    original = functional.scaled_dot_product_attention
    model = nn.Linear(3, 1)
    monitor = watch(model, torch.optim.SGD(model.parameters(), 0.1))
    monitor._probes["attention"].forward_begins()
    assert functional.scaled_dot_product_attention is not original
    monitor.close()
    assert functional.scaled_dot_product_attention is original


class Unreadable(dict):
    def items(self):
        raise ArithmeticError("nothing to see")


class Answer(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x):
        return Unreadable(y=self.layer(x))


@pytest.mark.parametrize("strict", [False, True])
def test_an_output_that_cannot_be_read_reaches_the_users_forward_only_if_it_is_strict(strict, caplog):
    model = Answer()
    monitor = forewarn.ModuleMonitor(lambda step: True, strict=strict)
    monitor.add_activation_metric("mean")
    monitor.set_module(model)
    for step in range(2):
        monitor.begin_step(step)
        if strict:
            with pytest.raises(ArithmeticError):
                model(torch.ones(2, 3))
        else:
            assert model(torch.ones(2, 3))["y"].shape == (2, 3)
            monitor.end_step()
    if not strict:
        assert "activation/layer/mean" in monitor.get_step_metrics()
        assert caplog.text.count("nothing to see") == 1
    monitor.close()
    assert hooks_on(model) == []


@pytest.mark.parametrize("kind", [OldSignature, Refusing])
def test_a_module_monitor_goes_on_beside_a_module_that_refuses_hooks(kind):
    model = nn.Sequential(kind(3, 3), nn.Linear(3, 3))
    monitor = forewarn.ModuleMonitor(lambda step: True)
    monitor.add_activation_metric("mean")
    monitor.set_module(model)
    monitor.begin_step(0)
    model(torch.ones(2, 3))
    monitor.end_step()
    assert "activation/1/mean" in monitor.get_step_metrics()
    assert "activation/0/mean" not in monitor.get_step_metrics()
    monitor.close()
    assert hooks_on(model) == []


def test_a_part_that_runs_inside_vmap_is_left_out_and_the_rest_is_measured(watch):
    class Mapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.outer = nn.Linear(3, 3), nn.Linear(3, 1)

        def forward(self, x):
            return self.outer(torch.vmap(self.inner)(x))

    model = Mapped()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = watch(model, optimizer)
    trained(model, monitor, optimizer)
    assert monitor._loop.failures == {}
    assert len(monitor.history.series("activation/mean", "outer")) == 3
    assert len(monitor.history.series("activation/mean", "inner")) == 0


def test_a_module_monitor_leaves_transformed_and_empty_tensors_alone(caplog):
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    monitor = forewarn.ModuleMonitor(lambda step: True)
    monitor.add_activation_metric("mean")
    monitor.add_activation_metric("own", lambda tensor: tensor.abs().max())
    monitor.add_parameter_metric("mean")
    monitor.set_module(model)
    monitor.begin_step(0)
    assert torch.vmap(model)(torch.ones(5, 3)).shape == (5, 3)
    monitor.end_step()
    assert monitor.get_step_metrics() == {}
    monitor.begin_step(1)
    model(torch.ones(5, 3))
    monitor.end_step()
    assert {"activation/0/mean", "activation/0/own"} <= monitor.get_step_metrics().keys()
    assert "failed" not in caplog.text
    monitor.close()
    meta = nn.Linear(3, 3, device="meta")
    monitor.set_module(meta)
    monitor.begin_step(2)
    assert meta(torch.ones(2, 3, device="meta")).shape == (2, 3)
    monitor.monitor_parameters()
    monitor.end_step()
    assert monitor.get_step_metrics() == {}
    monitor.close()
