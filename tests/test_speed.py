"""Speed and memory of a whole run: what the monitor records and says."""

import contextlib
import itertools
import logging
import sys
import threading
import time

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import forewarn


def train(monitor, model, optimizer, batches, **counts):
    for (inputs,) in batches:
        loss = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        monitor.step(loss, **counts)


@pytest.fixture
def made():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(TensorDataset(torch.randn(60, 4)), 2)


def test_a_watched_loop_trains_the_same_bits(made, watch):
    model, optimizer, loader = made
    start = {name: value.clone() for name, value in model.state_dict().items()}
    ends = []
    for is_watched in (False, True):
        model.load_state_dict(start)
        monitor = watch(model, optimizer, config={"stall_seconds": 0.01 if is_watched else 0.0})
        batches = monitor.watch_loader(loader) if is_watched else loader
        train(monitor, model, optimizer, batches)
        with monitor.pause("eval"):
            time.sleep(0.02)
        monitor.close()
        ends.append([parameter.detach().clone() for parameter in model.parameters()])
    assert all(map(torch.equal, *ends))


def test_the_phases_of_real_steps_add_up_to_their_time(made, watch):
    model, optimizer, loader = made
    monitor = watch(model, optimizer, every=1)
    train(monitor, model, optimizer, monitor.watch_loader(loader), tokens=8)
    phases = monitor.history.panel("speed/phase_seconds")
    steps = monitor.history.series("speed/step_seconds")
    assert phases.values.sum(axis=1) == pytest.approx(steps.values, rel=1e-3)
    assert (phases.values[:, phases.scopes.index("backward")] > 0).all()
    rate = monitor.history.series("speed/tokens_per_second").values
    assert rate == pytest.approx(8 / steps.values, rel=1e-3)
    assert not any(name.startswith("train/tok") for name in monitor.history.names())


def test_a_wrong_number_of_tokens_is_refused_at_the_first_step(made, watch):
    with pytest.raises(TypeError, match="tokens must be a number"):
        watch(*made[:2]).step(1.0, tokens="many")


@pytest.mark.parametrize("kind", ["", 3, None])
def test_a_pause_has_a_kind(kind, made, watch):
    with pytest.raises(TypeError, match="the kind of a pause must be a word"):
        watch(*made[:2]).pause(kind)


def test_a_loader_must_be_iterable(made, watch):
    with pytest.raises(TypeError, match="loader must be something to iterate over"):
        watch(*made[:2]).watch_loader(3)


@pytest.mark.parametrize(
    "error", [MemoryError("no"), torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")]
)
def test_a_run_that_ends_out_of_memory_says_so(error, made, tmp_path):
    model, optimizer, loader = made
    with contextlib.suppress(type(error)), forewarn.watch(model, optimizer, tmp_path / "run", views=[]) as monitor:
        train(monitor, model, optimizer, loader)
        raise error
    (alert,) = monitor.firing
    assert (alert.name, alert.severity.name) == ("out-of-memory", "CRITICAL")
    assert "gigabytes of the process" in alert.numbers
    with forewarn.open_run(tmp_path / "run") as run:
        assert run.series("system/out_of_memory").values.tolist() == [1.0]


def test_a_run_that_ends_otherwise_does_not(made, tmp_path):
    model, optimizer, loader = made
    with contextlib.suppress(KeyError), forewarn.watch(model, optimizer, tmp_path / "run", views=[]) as monitor:
        train(monitor, model, optimizer, loader)
        raise KeyError
    assert monitor.alerts == ()


def test_a_stall_leaves_a_warning_the_stacks_and_an_alert(made, tmp_path, caplog):
    model, optimizer, loader = made
    monitor = forewarn.watch(model, optimizer, tmp_path / "run", views=[], config={"stall_seconds": 0.02})
    train(monitor, model, optimizer, loader)
    stacks = tmp_path / "run" / "stalled.txt"
    monitor._stopwatch.usual_seconds = 0.0
    with caplog.at_level(logging.WARNING):
        for _ in range(500):
            if stacks.exists() and stacks.stat().st_size:
                break
            time.sleep(0.01)
    monitor.close()
    assert "test_a_stall_leaves_a_warning" in stacks.read_text()
    assert caplog.text.count("no sign of the loop") == 1
    assert [(alert.name, alert.scope) for alert in monitor.alerts] == [("stalled-run", "between passes")]


def watchdogs() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "forewarn watchdog"]


def test_the_watchdog_starts_after_the_first_steps(made, tmp_path):
    model, optimizer, loader = made
    before = watchdogs()
    with forewarn.watch(model, optimizer, tmp_path / "run", views=[]) as monitor:
        train(monitor, model, optimizer, itertools.islice(loader, 1))
        assert watchdogs() == before
        train(monitor, model, optimizer, loader)
        assert len(watchdogs()) == len(before) + 1


@pytest.mark.parametrize("where", ["switched off", "interactive session"])
def test_there_may_be_no_watchdog(where, made, tmp_path, monkeypatch):
    model, optimizer, loader = made
    config = {}
    if where == "switched off":
        config["stall_seconds"] = 0
    else:
        monkeypatch.setattr(sys, "ps1", "In [1]: ", raising=False)
    before = watchdogs()
    with forewarn.watch(model, optimizer, tmp_path / "run", views=[], config=config) as monitor:
        train(monitor, model, optimizer, loader)
        assert watchdogs() == before
