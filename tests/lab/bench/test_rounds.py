import pytest

from forewarn.lab.bench import rounds
from forewarn.lab.bench.contender import Contender
from forewarn.lab.bench.rounds import benchmark, num_turns
from forewarn.lab.bench.tiers import tiers
from forewarn.lab.bench.workloads import Workload
from tests.lab.bench.conftest import Failing, Missing, Recording, parts


@pytest.fixture(autouse=True)
def _short_turns(monkeypatch):
    """Turns of a small model have no more steps than asked for."""
    monkeypatch.setattr(rounds, "LEAST_TURN_SECONDS", 0.0)


def run(workload, contenders, tmp_path, rounds=2):
    told: list[str] = []
    result = benchmark(workload, contenders, rounds=rounds, steps=3, directory=tmp_path, tell=told.append)
    return result, told


def test_the_bare_loop_costs_nothing_by_definition_and_the_others_are_complete(small_workload, tmp_path):
    contenders = [Contender(), Recording(), *tiers()]
    result, told = run(small_workload, contenders, tmp_path)
    assert [cost.name for cost in result.costs] == [contender.name for contender in contenders]
    bare = result.costs[0]
    assert (bare.added_share.median, bare.added_share.low, bare.added_share.high) == (0.0, 0.0, 0.0)
    assert (bare.operations, bare.syncs, bare.held_bytes) == (0.0, 0.0, 0)
    assert len(told) == num_turns(contenders, rounds=2)
    assert (result.num_parameters, result.num_tensors, result.optimizer) == (58, 4, "AdamW")
    assert result.visits.read > 0
    assert result.visits.histograms > 0
    for cost in result.costs:
        assert cost.added_share.low <= cost.added_share.median <= cost.added_share.high


def test_rounds_end_early_if_time_runs_out_but_never_before_the_second(small_workload, tmp_path):
    contenders = [Contender(), Recording()]
    told: list[str] = []
    result = benchmark(
        small_workload, contenders, rounds=50, steps=3, directory=tmp_path, tell=told.append, seconds=1e-9
    )
    assert result.rounds == 2
    assert len(told) == num_turns(contenders, rounds=2)


def test_the_order_moves_on_by_one_each_round(small_workload, tmp_path):
    first, second = Recording(), Recording()
    first.name, second.name = "first", "second"
    _, told = run(small_workload, [Contender(), first, second], tmp_path, rounds=3)
    orders = [[words.split(": ")[1] for words in told if f"round {number} " in words] for number in (1, 2, 3)]
    assert orders == [["bare", "first", "second"], ["first", "second", "bare"], ["second", "bare", "first"]]


def test_judging_is_timed_apart_on_measured_and_on_other_steps(small_workload, tmp_path):
    result, _ = run(small_workload, [Contender(), *tiers()], tmp_path)
    assert result.judging is not None
    assert result.judging.measured is not None
    assert result.judging.measured.median > 0
    assert result.judging.unmeasured is not None
    assert result.judging.unmeasured.median > 0
    assert result.judging.depth == 2 * 2 * 5  # every round, with either model, goes on with the run of the one before
    assert run(small_workload, [Contender()], tmp_path)[0].judging is None


def test_who_is_not_installed_or_raises_is_left_out_with_the_reason(small_workload, tmp_path):
    result, _ = run(small_workload, [Contender(), Missing(), Failing()], tmp_path)
    assert [cost.name for cost in result.costs] == ["bare"]
    reasons = {absent.name: absent.reason for absent in result.absent}
    assert reasons == {
        "missing": "not installed: pip install no-such-package",
        "failing": "failed: RuntimeError: no\nluck",
    }


def test_a_workload_that_does_not_train_is_an_error(tmp_path):
    def broken():
        model, make_batch, _ = parts()
        return model, make_batch, lambda model, batch: model(batch[:, :2]).mean()

    with pytest.raises(ValueError, match="the workload broken does not train: RuntimeError"):
        run(Workload("broken", "", broken), [Contender()], tmp_path)
