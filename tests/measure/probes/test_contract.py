"""One contract over every probe: named, documented, quiet without events, harmless, resumable, and never in the way."""

import io

import pytest
import torch
from torch import nn

import forewarn
from forewarn.attach import _probes
from forewarn.measure.parameters import ParameterIndex
from forewarn.measure.probe import Pending, Probe
from forewarn.measure.probes.speed import Stopwatch
from forewarn.measure.transfer import on_host

EVENTS = ("backward_begins", "backward_ended", "before_update", "after_update", "collect")


def setup():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5), nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return model, optimizer


def made() -> dict[str, Probe]:
    model, optimizer = setup()
    return _probes(ParameterIndex(model, [optimizer]), forewarn.Config(), None, Stopwatch())


NAMES = list(made())


def decoded(pending: Pending | None):
    return [] if pending is None else list(pending.decode([on_host(tensor) for tensor in pending.tensors]))


def train(model, optimizer, monitor, steps=4):
    losses = []
    for _ in range(steps):
        loss = model(torch.ones(2, 4)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        monitor.step(loss)
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", NAMES)
def test_it_is_named_and_says_what_it_measures(name):
    probe = made()[name]
    assert probe.name == name
    assert type(probe).__doc__
    assert type(probe).__module__.startswith("forewarn.measure.probes.")


@pytest.mark.parametrize("measured", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_without_any_event_it_has_nothing_wrong_to_say(name, measured):
    for reading in decoded(made()[name].collect(measured)):
        assert forewarn.types.is_metric_name(reading.name)
        assert reading.name not in ("gradient/global_norm", "train/loss")


@pytest.mark.parametrize("name", NAMES)
def test_its_state_survives_a_safe_save(name, watch):
    model, optimizer = setup()
    monitor = watch(model, optimizer)
    train(model, optimizer, monitor)
    file = io.BytesIO()
    torch.save(monitor.state_dict()["probes"][name], file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    other = made()[name]
    other.load_state_dict(
        {key: value.numpy() if isinstance(value, torch.Tensor) else value for key, value in state.items()}
    )
    assert repr(other.state_dict()) == repr(monitor._probes[name].state_dict())


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("name", NAMES)
def test_an_exception_in_any_event_switches_it_off_and_leaves_the_run_alone(name, event, watch, caplog):
    model, optimizer = setup()
    torch.manual_seed(1)
    bare = train(model, optimizer, type("Nothing", (), {"step": lambda self, loss: None})())
    model, optimizer = setup()
    torch.manual_seed(1)
    monitor = watch(model, optimizer)

    def explode(*args):
        raise RuntimeError("broken on purpose")

    setattr(monitor._probes[name], event, explode)
    assert train(model, optimizer, monitor) == bare
    assert ("X101", name) in {alert.identity for alert in monitor.alerts}


@pytest.mark.parametrize("name", NAMES)
def test_an_exception_while_decoding_switches_it_off(name, watch, caplog):
    model, optimizer = setup()
    monitor = watch(model, optimizer)

    def broken(arrays):
        raise RuntimeError("broken on purpose")

    monitor._probes[name].collect = lambda measured: Pending((), broken)
    train(model, optimizer, monitor)
    assert ("X101", name) in {alert.identity for alert in monitor.alerts}


@pytest.mark.parametrize("name", NAMES)
def test_it_draws_no_random_number_changes_no_tensor_and_leaves_the_gradient_mode(name):
    model, optimizer = setup()
    probe = _probes(ParameterIndex(model, [optimizer]), forewarn.Config(), None, Stopwatch())[name]
    model(torch.ones(2, 4)).sum().backward()
    tensors = [*model.parameters(), *(parameter.grad for parameter in model.parameters())]
    before = [tensor.detach().clone() for tensor in tensors]
    random, mode = torch.get_rng_state(), torch.is_grad_enabled()
    for measured in (True, False):
        probe.backward_begins(measured)
        probe.backward_ended(measured)
        for closure in (True, False):
            probe.before_update(0, optimizer, measured, closure)
            probe.after_update(0, optimizer, measured, closure)
        decoded(probe.collect(measured))
    assert torch.equal(random, torch.get_rng_state())
    assert torch.is_grad_enabled() is mode
    assert all(torch.equal(old, new.detach()) for old, new in zip(before, tensors, strict=True))
