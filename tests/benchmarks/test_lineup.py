"""Every contender of the comparison: how it is chosen, and that it leaves nothing behind."""

import pytest

from benchmarks.overhead.lineup import CORE, all_contenders, find_contenders
from benchmarks.overhead.matches import MATCHES
from forewarn.lab.bench.contender import Loop, Turn


def test_contenders_are_chosen_by_name_and_by_group():
    names = [contender.name for contender in all_contenders()]
    assert [contender.name for contender in find_contenders("all")] == names
    assert [contender.name for contender in find_contenders("wandb")] == ["bare", "wandb"]
    assert [contender.name for contender in find_contenders("forewarn, pulsegrad")] == [
        "bare", "bare-again", "forewarn-every-step", "forewarn-default", "forewarn-full",
        "forewarn-activations", "pulsegrad",
    ]  # fmt: skip
    assert {contender.name for contender in find_contenders("core")} == {"bare", *CORE}
    with pytest.raises(ValueError, match="no contender 'wnadb'; there are all"):
        find_contenders("wnadb")


def test_contenders_are_named_once_and_described_and_know_their_pip_line():
    contenders = all_contenders()
    assert len({contender.name for contender in contenders}) == len(contenders)
    for contender in contenders:
        assert contender.description
        assert (contender.package is None) == (contender.install == "")


def test_every_other_tool_has_a_match_with_the_same_statistics():
    names = [contender.name for contender in all_contenders()]
    assert [name for name in names if not name.startswith(("bare", "forewarn"))] == list(MATCHES)
    assert set(MATCHES.values()) <= set(names)


@pytest.mark.parametrize("name", [contender.name for contender in all_contenders()])
def test_every_contender_runs_and_leaves_the_model_as_it_was(name, small_workload, tmp_path, monkeypatch):
    contender = next(contender for contender in all_contenders() if contender.name == name)
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
