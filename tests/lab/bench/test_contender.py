import contextlib

import pytest

from forewarn.cli import bench as command
from forewarn.lab.bench.contender import LEAST_CYCLE, WARM_UP_STEPS, Loop, Turn
from forewarn.lab.bench.lineup import all_contenders, chosen
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


def test_contenders_are_chosen_by_name_and_by_group():
    names = [contender.name for contender in all_contenders()]
    assert [contender.name for contender in chosen("all")] == names
    assert [contender.name for contender in chosen("wandb")] == ["bare", "wandb"]
    assert [contender.name for contender in chosen("forewarn, pulsegrad")] == [
        "bare", "bare-again", "forewarn-every-step", "forewarn-default", "forewarn-full",
        "forewarn-activations", "pulsegrad",
    ]  # fmt: skip
    with pytest.raises(ValueError, match="no contender 'wnadb'; there are all"):
        chosen("wnadb")


def test_contenders_are_named_once_and_described_and_know_their_pip_line():
    every = all_contenders()
    assert len({contender.name for contender in every}) == len(every)
    for contender in every:
        assert contender.description
        assert (contender.package is None) == (contender.install == "")


def test_the_command_asks_for_as_many_steps_as_a_turn_needs():
    assert command.LEAST_STEPS == LEAST_CYCLE


@pytest.mark.parametrize("name", [contender.name for contender in all_contenders()])
def test_every_contender_runs_and_leaves_the_model_as_it_was(name, small_workload, tmp_path, monkeypatch):
    contender = next(each for each in all_contenders() if each.name == name)
    if contender.missing():
        pytest.skip(contender.missing())
    turn = Turn(tmp_path, 3)
    built = []
    build = type(small_workload).build
    monkeypatch.setattr(type(small_workload), "build", lambda self: built.append(build(self)) or built[-1])
    for _ in range(2):
        with Loop(small_workload, contender, turn) as loop:
            for _ in range(turn.num_steps):
                loop.fetch()
                loop.step()
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    for training in built:
        assert not any(getattr(module, kind) for module in training.model.modules() for kind in kinds)
        assert not any(parameter._backward_hooks for parameter in training.model.parameters())
        assert not training.optimizer._optimizer_step_pre_hooks
