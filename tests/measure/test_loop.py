"""What a probe may see of the gradients of parameters while a backward pass runs, and that nothing of it stays."""

import copy

import pytest
import torch
from torch import nn

from forewarn.measure.loop import Loop
from forewarn.measure.probe import GradientTap, Probe
from forewarn.measure.probes.speed import Stopwatch


class Follower(Probe):
    """Takes the sum of every gradient on its way, or fails at that."""

    name = "follower"

    def __init__(self, model, fails=""):
        self.model = model
        self.fails = fails
        self.sums = []

    def gradient_taps(self):
        if self.fails == "following":
            raise ValueError("nothing to follow")
        return [GradientTap(each, self.reached) for each in self.model.parameters()]

    def reached(self, gradient):
        if self.fails == "reached":
            raise ValueError("can not read this")
        self.sums.append(float(gradient.sum()))


def hooks_of(model):
    return [each._backward_hooks for each in model.parameters()]


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def watched(model, measured=True, **settings):
    probe = Follower(model, **settings)
    loop = Loop(model, [], [probe], Stopwatch())
    loop.measured = measured
    return probe, loop


def test_gradients_are_seen_before_they_are_added_and_the_hooks_are_gone_after_the_pass(model):
    for each in model.parameters():
        each.grad = torch.ones_like(each)
    probe, _ = watched(model)
    model(torch.ones(2, 3)).sum().backward()
    added = [float((each.grad - 1).sum()) for each in model.parameters()]
    assert sorted(probe.sums) == pytest.approx(sorted(added), abs=1e-5)
    assert hooks_of(model) == [None] * 4


def test_steps_that_are_not_measured_have_no_hooks(model):
    probe, _ = watched(model, measured=False)
    model(torch.ones(2, 3)).sum().backward()
    assert probe.sums == []


def test_gradients_are_moved_into_place_and_not_copied(model):
    places = {}

    def see(gradient):
        places["on its way"] = gradient.data_ptr()

    watched(model)
    model[0].weight.register_hook(see)
    model(torch.ones(2, 3)).sum().backward()
    assert model[0].weight.grad.data_ptr() == places["on its way"]
    assert len(hooks_of(model)[0]) == 1  # the user's own stays


@pytest.mark.parametrize("end", ["collect", "close", "next pass"])
def test_a_pass_that_raised_leaves_its_hooks_no_longer_than_to_the_next_event(model, end):
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise ArithmeticError("broken")

    probe, loop = watched(model)
    broken = Broken.apply(model[0](torch.ones(2, 3)))
    output = model(torch.ones(2, 3)).sum() + broken.sum()
    with pytest.raises(ArithmeticError):
        output.backward()
    if any(hooks_of(model)):
        copy.deepcopy(model)
    if end == "next pass":
        probe.sums.clear()
        model(torch.ones(2, 3)).sum().backward()
        assert len(probe.sums) == 4
    else:
        getattr(loop, end)()
    assert hooks_of(model) == [None] * 4


@pytest.mark.parametrize("fails", ["following", "reached"])
def test_a_probe_that_fails_at_it_is_switched_off_and_training_goes_on(model, fails, caplog):
    _, loop = watched(model, fails=fails)
    model(torch.ones(2, 3)).sum().backward()
    assert list(loop.failures) == ["follower"]
    assert loop.probes == []
    assert all(each.grad is not None for each in model.parameters())
    assert hooks_of(model) == [None] * 4
    assert "follower" in caplog.text


def test_a_backward_pass_that_nobody_heeds_is_not_hooked(watch):
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = watch(model, optimizer, every=lambda step: step == 3)
    hooked = []
    for clip in (True, True, False, True, True, True):
        output = model(torch.ones(2, 3))
        hooked.append(bool(output._backward_hooks))
        optimizer.zero_grad()
        output.sum().backward()
        if clip:
            monitor.clip_grad_norm_(1.0)
        optimizer.step()
        monitor.step(output.sum())
    # At the start nobody knows, after a step without clipping the norm has to be read, and step 3 is measured.
    assert hooked == [True, False, False, True, False, False]


def test_a_probe_that_fails_when_asked_whether_it_heeds_is_switched_off_and_training_goes_on(model, caplog):
    class Undecided(Probe):
        name = "undecided"

        def needs_every_backward(self):
            raise ValueError("who knows")

        def backward_begins(self, step): ...

    loop = Loop(model, [], [Undecided()], Stopwatch())
    model(torch.ones(2, 3)).sum().backward()
    assert loop.probes == []
    assert "undecided" in caplog.text


def test_a_probe_that_only_waits_for_the_begin_is_heeded_on_every_step(model):
    begun = []

    class Waiting(Probe):
        def backward_begins(self, step):
            begun.append(step)

    Loop(model, [], [Waiting()], Stopwatch())
    model(torch.ones(2, 3)).sum().backward()
    assert [step.measured for step in begun] == [False]
