import contextlib

import pytest

from forewarn.cli import bench as command
from forewarn.lab.bench.contender import LEAST_CYCLE, WARM_UP_STEPS, Loop, Turn
from tests.lab.bench.conftest import Failing, Missing, Recording


@pytest.mark.parametrize("cycle", [3, 4, 7, 10, 25])
def test_exactly_one_timed_step_has_rare_work_and_the_one_after_it_is_timed_too(cycle, tmp_path):
    turn = Turn(tmp_path, cycle)
    timed = list(range(WARM_UP_STEPS, turn.num_steps))
    rare = [step for step in timed if turn.is_rare(step)]
    assert len(timed) == cycle
    assert len(rare) == 1
    assert rare[0] + 1 in timed


@pytest.mark.parametrize("period", [10, 50, 100])
@pytest.mark.parametrize("cycle", [3, 10])
def test_a_rare_step_counts_as_often_as_it_comes(cycle, period, tmp_path):
    turn = Turn(tmp_path, cycle)
    weights = dict(zip(range(WARM_UP_STEPS, turn.num_steps), turn.weights(period), strict=True))
    assert sum(weights.values()) == pytest.approx(period)
    assert weights[cycle] == 1.0
    assert turn.weights(1) == [1.0] * cycle


def test_the_loop_calls_a_contender_as_a_training_loop_would(small_workload, tmp_path):
    contender = Recording()
    with Loop(small_workload, contender, Turn(tmp_path, 3)) as loop:
        for _ in range(2):
            loop.fetch()
            loop.step()
    assert contender.events == ["attach", *["backward", "clip", "step"] * 2, "close"]


def test_every_turn_trains_the_same_steps(small_workload, tmp_path):
    losses = []
    for _ in range(2):
        contender = Recording()
        with Loop(small_workload, contender, Turn(tmp_path, 3)) as loop:
            for _ in range(3):
                loop.fetch()
                loop.step()
        losses.append(contender.losses)
    assert losses[0] == losses[1]
    assert len(set(losses[0])) == 3


def test_a_contender_that_raises_is_closed(small_workload, tmp_path):
    contender = Failing()
    loop = Loop(small_workload, contender, Turn(tmp_path, 3))
    with contextlib.suppress(RuntimeError), loop:
        loop.fetch()
        loop.step()
    assert contender.events[-1] == "close"


def test_a_missing_package_is_told_with_its_pip_line():
    assert Missing().missing() == "not installed: pip install no-such-package"
    assert Recording().missing() is None


def test_the_command_asks_for_as_many_steps_as_a_turn_needs():
    assert command.LEAST_STEPS == LEAST_CYCLE
