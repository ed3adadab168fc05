"""The watchdog, with a clock that the test turns and without its thread."""

import gc
import threading
import weakref

import pytest

from forewarn.measure.stopwatch import IN_FORWARD, UPDATE_ENDED, Stopwatch
from forewarn.measure.watchdog import Watchdog


class Heard:
    def __init__(self):
        self.alarms = []

    def alarm(self, phase, seconds):
        self.alarms.append((phase, seconds))


@pytest.fixture
def made():
    now, cpu, heard = [0.0], [0.0], Heard()
    stopwatch = Stopwatch(lambda: now[0])
    watchdog = Watchdog(stopwatch, weakref.WeakMethod(heard.alarm), 60.0, cpu_clock=lambda: cpu[0])
    return now, cpu, heard, stopwatch, watchdog


def test_a_stall_is_reported_once_with_its_phase(made):
    now, _, heard, stopwatch, watchdog = made
    stopwatch.end_step()
    stopwatch.begin(IN_FORWARD)
    for now[0] in (59.0, 61.0, 300.0):
        assert watchdog.check()
    assert heard.alarms == [("forward", 61.0)]
    stopwatch.end_step()
    now[0] += 61
    watchdog.check()
    assert heard.alarms[1:] == [("between passes", 61.0)]


def test_a_slow_loop_and_a_pause_are_no_stall(made):
    now, _, heard, stopwatch, watchdog = made
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
    assert heard.alarms == [("between passes", 201.0)]


@pytest.mark.parametrize(("state", "limit"), [(UPDATE_ENDED, 600.0), (IN_FORWARD, 60.0)])
def test_work_outside_of_the_passes_may_take_ten_times_as_long(state, limit, made):
    now, cpu, heard, stopwatch, watchdog = made
    stopwatch.begin(state)
    while not heard.alarms:
        now[0] += 15.0
        cpu[0] += 5.0
        watchdog.check()
    assert [seconds for _, seconds in heard.alarms] == [limit + 15.0]


def test_the_thread_is_a_daemon_that_ends_with_the_run(made):
    *_, watchdog = made
    watchdog._least = 0.01
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
