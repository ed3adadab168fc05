"""What a probe may see of the gradients of parameters while a backward pass runs, and that nothing of it stays."""

import copy

import pytest
import torch
from torch import nn

import forewarn
from forewarn.measure.loop import Loop
from forewarn.measure.probe import ONE, GradientTap, ModuleTap, Pending, Probe, Reading
from forewarn.measure.stopwatch import Stopwatch
from forewarn.measure.transfer import Transfer


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
    reached, hooked = [], []
    hook = monitor._loop._reached_hook
    hook.target = lambda gradients, see=hook.target: (reached.append(gradients), see(gradients))
    for clip in (True, True, False, True, True, True):
        output = model(torch.ones(2, 3))
        optimizer.zero_grad()
        reached.clear()
        output.sum().backward()
        hooked.append(bool(reached))
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


# ---- one step and the next ----


class Counter(Probe):
    """As simple as a probe can be."""

    name = "counter"

    def __init__(self):
        self.steps = 0

    def collect(self, step):
        self.steps += 1
        return Pending(decode=lambda arrays: [Reading("user/steps", ONE, self.steps)])


def test_a_name_and_collect_make_a_probe(model):
    loop = Loop(model, [], [Counter()], Stopwatch())
    _, [(probe, pending)], _ = loop.collect()
    assert probe.name == "counter"
    assert list(pending.decode([])) == [Reading("user/steps", ("",), 1)]


def test_what_was_provided_for_one_step_is_gone_at_the_next(model):
    loop = Loop(model, [], [], Stopwatch())
    loop.step.provide(3.5)
    first, *_ = loop.collect()
    assert first.get(float) == 3.5
    assert loop.step.get(float) is None


def test_readings_that_arrive_a_step_later_are_those_of_readings_that_are_there_at_once(small, watch):
    class Late(Transfer):
        """Keeps the newest step back, as an accelerator does."""

        def receive(self, wait=False):
            newest = [] if wait else [self._queue.pop()]
            received = super().receive(wait)
            self._queue.extend(newest)
            return received

    def run(transfer, fail_at=None):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        monitor = watch(model, optimizer)
        monitor._transfer = transfer
        for step in range(6):
            if step == fail_at:
                monitor._probes["stepping"].before_update = None
                monitor._loop._listeners.clear()
            loss = model(torch.ones(3, 4)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.step(loss)
        monitor.close()
        with forewarn.open_run(monitor._writer.path) as stored:
            wanted = ("update/ratio", "gradient/norm", "gradient/global_norm", "update/frozen_cause")
            series = [stored.series(name, scope) for name in wanted for scope in stored.scopes(name)]
            return [(one.steps.tolist(), one.values.tolist()) for one in series], monitor.alerts

    assert run(Late()) == run(Transfer())
    readings, alerts = run(Late(), fail_at=3)
    assert {tuple(steps) for steps, _ in readings} == {(0, 1, 2)}
    assert {alert.code for alert in alerts} == {"X101", "X103"}


# ---- doors ----


def explode(*args):
    raise RuntimeError("broken on purpose")


@pytest.mark.parametrize(
    ("event", "answer"),
    [
        ("module_taps", lambda: [3]),
        ("module_taps", lambda: 3),
        ("gradient_taps", lambda: [3]),
        ("gradient_taps", lambda: [GradientTap(torch.ones(1), print)]),
        ("collect", lambda step: 3),
        ("collect", lambda step: Pending([torch.empty(1, device="meta")])),
        ("collect", lambda step: Pending(decode=lambda arrays: None)),
    ],
)
def test_wrong_answers_of_a_probe_stay_behind_the_door(event, answer, small, watch):
    model, optimizer = small
    monitor = watch(model, optimizer)
    monitor._loop.probes.append(wrong := Counter())
    setattr(wrong, event, answer)
    _train(model, optimizer, monitor)
    assert list(monitor._loop.failures) == ["counter"]


def test_a_tap_on_a_tensor_without_a_gradient_stays_behind_the_door(small, watch):
    model, optimizer = small
    monitor = watch(model, optimizer)
    monitor._loop.probes.append(wrong := Counter())
    tap = GradientTap(torch.ones(1), print)
    wrong.module_taps = lambda: [ModuleTap(model[0], left=lambda args, kwargs, output: [tap])]
    _train(model, optimizer, monitor)
    assert list(monitor._loop.failures) == ["counter"]


@pytest.mark.parametrize(
    "part", ["_forward_begins", "_forward_ended", "_backward_reached", "_backward_ended", "_gradients_settled", "_tell"]
)
def test_a_failure_of_the_loop_itself_stays_behind_the_door(part, small, watch, monkeypatch):
    model, optimizer = small
    monkeypatch.setattr(Loop, part, explode)
    monitor = watch(model, optimizer)
    _train(model, optimizer, monitor)
    assert list(monitor._loop.failures) == ["hooks"]


def test_parameters_that_can_not_be_listed_are_one_failure_and_hide_no_step(small, watch, monkeypatch):
    model, optimizer = small
    monitor = watch(model, optimizer)
    monkeypatch.setattr("forewarn.measure.parameters.ParameterIndex.refresh", explode)
    _train(model, optimizer, monitor)
    assert [alert.scope for alert in monitor.alerts] == ["parameters"]
    assert monitor.history.series("update/optimizer_steps").values.tolist() == [1, 1, 1]


def test_clipping_works_whatever_becomes_of_its_norm(small, watch, monkeypatch):
    model, optimizer = small
    monitor = watch(model, optimizer)
    monkeypatch.setattr(monitor._probes["gradients"], "clipped", explode)
    model(torch.ones(3, 4)).square().sum().backward()
    norm = monitor.clip_grad_norm_(1e-3)
    clipped = torch.cat([each.grad.flatten() for each in model.parameters()]).norm()
    assert float(norm) > 1e-3
    assert float(clipped) == pytest.approx(1e-3, rel=1e-3)
    assert list(monitor._loop.failures) == ["gradients"]


def _train(model, optimizer, monitor, steps=3):
    for _ in range(steps):
        loss = model(torch.ones(3, 4)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        monitor.step(loss)
