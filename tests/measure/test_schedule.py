"""Which steps are measured in detail."""

import pytest

from forewarn.measure.schedule import Escalation, Schedule, as_predicate


def test_the_first_steps_are_dense_and_then_every_so_many():
    measured = [step for step in range(301) if Schedule(every=100, dense=10)(step)]
    assert measured == [*range(10), 100, 200, 300]


@pytest.mark.parametrize(("settings", "error"), [
    ({"every": 0}, ValueError), ({"dense": -1}, ValueError), ({"every": 2.5}, TypeError), ({"every": True}, TypeError),
])  # fmt: skip
def test_a_wrong_schedule_is_refused(settings, error):
    with pytest.raises(error, match=next(iter(settings))):
        Schedule(**settings)


def test_a_number_a_schedule_and_a_function_are_all_accepted():
    assert as_predicate(50) == Schedule(every=50)
    assert as_predicate(Schedule(every=7)) == Schedule(every=7)
    assert [step for step in range(9) if as_predicate(lambda step: step % 4 == 3)(step)] == [3, 7]


@pytest.mark.parametrize("every", [True, 2.5, "100", None])
def test_anything_else_is_not(every):
    with pytest.raises(TypeError, match="every must be"):
        as_predicate(every)


def test_after_an_anomaly_every_step_is_measured_for_a_while():
    schedule = Escalation(Schedule(every=100, dense=0), steps=20)
    schedule.escalate(150)
    assert [step for step in range(101, 200) if schedule.measured(step)] == list(range(101, 171))
    schedule.escalate(160)
    assert schedule.measured(180)
    assert not schedule.measured(181)


def test_an_older_anomaly_does_not_end_the_escalation_early():
    schedule = Escalation(Schedule(every=100), steps=20)
    schedule.escalate(160)
    schedule.escalate(150)
    assert schedule.until == 180


def test_while_a_warning_waits_for_another_check_the_next_steps_are_measured():
    schedule = Escalation(Schedule(every=100, dense=0), steps=20)
    schedule.look_again(100)
    assert [step for step in range(101, 200) if schedule.measured(step)] == [101, 102]


def test_no_step_is_added_for_it_if_none_are_added_after_a_warning():
    schedule = Escalation(Schedule(every=100, dense=0), steps=0)
    schedule.look_again(100)
    assert not schedule.measured(101)
