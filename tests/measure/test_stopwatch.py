"""Where the time of a step goes, with a clock that the test turns."""

import contextlib

import numpy as np
import pytest

from forewarn.measure.probes.speed import SpeedProbe
from forewarn.measure.step import Step
from forewarn.measure.stopwatch import (
    BACKWARD_ENDED,
    EVALUATION_ENDED,
    FORWARD_ENDED,
    IN_BACKWARD,
    IN_EVALUATION,
    IN_FORWARD,
    IN_UPDATE,
    PHASES,
    UPDATE_ENDED,
    WAITING_FOR_DATA,
    Stopwatch,
)


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


class Loop:
    """A loop of which each event comes after some seconds."""

    def __init__(self, **options):
        self.clock = Clock()
        self.watch = Stopwatch(self.clock, **options)
        self.probe = SpeedProbe(self.watch)
        self.readings = {}

    def after(self, seconds, state=None):
        self.clock.now += seconds
        if state == "forward ended":
            self.watch.begin(EVALUATION_ENDED if self.watch.state == IN_EVALUATION else FORWARD_ENDED)
        elif state is not None:
            self.watch.begin(state)

    def step(self, measured=True, own=0.0, **counts):
        with self.watch:
            self.clock.now += own
            self.probe.give(counts)
            pending = self.probe.collect(Step(measured))
            readings = [] if pending is None else pending.decode(pending.tensors)
            values = {name: np.atleast_1d(values).tolist() for name, _, values in readings}
            self.readings = {name: dict(zip(scopes, values[name], strict=True)) for name, scopes, _ in readings}

    def plain_step(self, **given):
        self.after(1, IN_FORWARD)
        self.after(2, "forward ended")
        self.after(0.5, IN_BACKWARD)
        self.after(3, BACKWARD_ENDED)
        self.after(0.25, IN_UPDATE)
        self.after(4, UPDATE_ENDED)
        self.after(0.125)
        self.step(**given)


def phases(loop):
    return loop.readings["speed/phase_seconds"]


def test_each_second_belongs_to_one_phase():
    loop = Loop()
    loop.plain_step()
    assert loop.readings == {}, "what came before the first step is not known"
    loop.plain_step(own=0.5)
    assert phases(loop) == {
        "data": 0, "between passes": 1, "forward": 2.5, "backward": 3, "optimizer": 4.25, "monitor": 0.5,
        "other": 0.125,
    }  # fmt: skip
    assert loop.readings["speed/step_seconds"] == {"": 11.375}
    assert loop.readings["monitor/overhead_share"][""] == pytest.approx(0.5 / 11.375)


def test_phases_are_means_over_the_steps_since_the_last_reading():
    loop = Loop()
    loop.step()
    for wait in (0.1, 0.2, 0.6):
        loop.after(wait, IN_FORWARD)
        loop.after(0, "forward ended")
        loop.step(measured=wait == 0.6)
        assert ("speed/phase_seconds" in loop.readings) == (wait == 0.6)
    assert phases(loop)["between passes"] == pytest.approx(0.3)


def test_an_unmeasured_step_is_read_once_a_second_has_passed():
    loop = Loop()
    for _ in range(2):
        loop.step(measured=False)
        loop.after(0.6)
    assert "speed/phase_seconds" not in loop.readings
    loop.step(measured=False)
    assert "speed/phase_seconds" in loop.readings


def test_the_wait_of_a_watched_loader_is_its_own_and_nothing_else_is():
    loop = Loop()
    loop.watch.watch_loader()
    loop.step()
    loop.after(1, WAITING_FOR_DATA)
    loop.after(5, UPDATE_ENDED)
    loop.after(2, IN_FORWARD)
    loop.after(0, "forward ended")
    loop.step()
    assert (phases(loop)["data"], phases(loop)["other"]) == (5, 3)


def test_the_next_micro_batch_comes_between_passes_too():
    loop = Loop()
    loop.step()
    for _ in range(2):
        loop.after(1, IN_FORWARD)
        loop.after(0, "forward ended")
        loop.after(0, IN_BACKWARD)
        loop.after(1, BACKWARD_ENDED)
    loop.step()
    assert (phases(loop)["between passes"], phases(loop)["backward"]) == (2, 2)


def test_a_backward_pass_that_nobody_watches_lies_between_forward_and_optimizer():
    loop = Loop()
    loop.step()
    loop.after(1, IN_FORWARD)
    loop.after(1, "forward ended")
    loop.after(7, IN_UPDATE)
    loop.after(0, UPDATE_ENDED)
    loop.step()
    assert phases(loop)["backward"] == 7


def test_a_pause_counts_nowhere_even_nested_or_interrupted():
    loop = Loop()
    loop.step()
    with contextlib.suppress(KeyError), loop.watch.pause("eval"), loop.watch.pause("checkpoint"):
        loop.after(50, IN_FORWARD)
        assert loop.watch.idle_seconds == 0
        raise KeyError
    loop.after(1, IN_FORWARD)
    loop.after(2, "forward ended")
    loop.step()
    assert loop.readings["speed/step_seconds"] == {"": 3}
    assert loop.readings["speed/pause_seconds"] == {"eval": 50}
    assert phases(loop)["between passes"] == 1
    loop.step()
    assert "speed/pause_seconds" not in loop.readings


def test_an_evaluation_that_is_not_marked_is_a_pause():
    loop = Loop()
    loop.step()
    for _ in range(3):
        loop.after(1, IN_EVALUATION)
        loop.after(10, "forward ended")
    loop.after(4, IN_FORWARD)
    loop.after(1, "forward ended")
    loop.step()
    assert loop.readings["speed/pause_seconds"] == {"eval": 32}
    assert loop.readings["speed/step_seconds"] == {"": 6}
    assert phases(loop)["between passes"] == 4


def test_rates_are_of_the_time_without_pauses():
    loop = Loop()
    loop.step()
    loop.after(2)
    loop.step(measured=False, tokens=100, samples=4)
    loop.after(1)
    with loop.watch.pause("eval"):
        loop.after(100)
    loop.step(measured=True, tokens=60)
    assert loop.readings["speed/tokens_per_second"] == {"": 60}
    loop.after(4)
    loop.step(tokens=60, samples=2)
    assert loop.readings["speed/tokens_per_second"] == {"": 15}
    assert loop.readings["speed/samples_per_second"] == {"": 0.5}


class FakeEvent:
    """An event on a device that runs a second behind the host."""

    reached = False

    def __init__(self, clock):
        self.clock = clock

    def record(self):
        self.at = self.clock.now

    def query(self):
        return self.reached

    def elapsed_time(self, end):
        return 1000 * 10 * (end.at - self.at)  # ten times as long as the host thinks


@pytest.mark.parametrize("reached", [True, False])
def test_on_a_device_the_phases_are_those_of_its_events_if_it_has_passed_them(reached, monkeypatch):
    monkeypatch.setattr(FakeEvent, "reached", reached)
    clocks = []
    loop = Loop(make_event=lambda: FakeEvent(clocks[0]))
    clocks.append(loop.clock)
    for _ in range(3):
        loop.plain_step(measured=True)
    factor = 10 if reached else 1
    assert phases(loop)["backward"] == 3 * factor
    assert phases(loop)["between passes"] == 1 * factor
    assert set(phases(loop)) == set(PHASES)
