"""The watchdog, with a clock that the test turns and without its thread."""

import gc
import threading
import weakref

import pytest

from forewarn.measure.stopwatch import IN_FORWARD, Stopwatch
from forewarn.measure.watchdog import Watchdog


class Heard:
    def __init__(self):
        self.alarms = []

    def alarm(self, phase, seconds):
        self.alarms.append((phase, seconds))


@pytest.fixture
def made():
    now, heard = [0.0], Heard()
    stopwatch = Stopwatch(lambda: now[0])
    return now, heard, stopwatch, Watchdog(stopwatch, weakref.WeakMethod(heard.alarm), 60.0)


def test_a_stall_is_reported_once_with_its_phase(made):
    now, heard, stopwatch, watchdog = made
    stopwatch.end_step()
    stopwatch.begin(IN_FORWARD)
    for now[0] in (59.0, 61.0, 300.0):
        assert watchdog.check()
    assert heard.alarms == [("forward", 61.0)]
    stopwatch.end_step()
    now[0] += 61
    watchdog.check()
    assert heard.alarms[1:] == [("data", 61.0)]


def test_a_slow_loop_and_a_pause_are_no_stall(made):
    now, heard, stopwatch, watchdog = made
    stopwatch.usual_seconds = 10.0
    now[0] = 199.0
    watchdog.check()
    with stopwatch.pause("eval"):
        now[0] = 5000.0
        watchdog.check()
    now[0] += 199.0
    watchdog.check()
    assert heard.alarms == []
    now[0] += 2.0
    watchdog.check()
    assert heard.alarms == [("data", 201.0)]


def test_the_thread_is_a_daemon_that_starts_after_the_first_steps_and_ends_with_the_run(made):
    _, _, stopwatch, watchdog = made
    watchdog._least = 0.01
    stopwatch.end_step()
    watchdog.start()
    assert watchdog._thread is None
    stopwatch.end_step()
    watchdog.start()
    thread = watchdog._thread
    assert thread.daemon
    assert thread in threading.enumerate()
    watchdog.stop()
    thread.join(5)
    assert not thread.is_alive()


def test_it_keeps_nothing_alive():
    stopwatch, heard = Stopwatch(), Heard()
    watchdog = Watchdog(stopwatch, weakref.WeakMethod(heard.alarm), 60.0)
    del stopwatch
    gc.collect()
    assert not watchdog.check()
