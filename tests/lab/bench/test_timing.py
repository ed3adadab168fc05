import pytest
from torch import nn

from forewarn.lab.bench.contender import Contender, Turn
from forewarn.lab.bench.timing import timed_turn, visits
from forewarn.lab.bench.workloads import Workload
from tests.lab.bench.conftest import Recording, parts


class Reaching(Recording):
    name = "reaching"
    is_process_wide = True


@pytest.fixture
def noted():
    """A workload that notes which of its models makes a step, numbered as they appear; and those notes."""
    seen: list[int] = []
    models: list[nn.Module] = []

    def made():
        model, make_batch, loss = parts()

        def noting(model, batch):
            if all(model is not other for other in models):
                models.append(model)
            seen.append(next(index for index, other in enumerate(models) if other is model))
            return loss(model, batch)

        return model, make_batch, noting

    return Workload("noted", "", made), seen


def test_contender_and_bare_loop_alternate_take_turns_at_going_first_and_change_models(noted, tmp_path):
    workload, seen = noted
    contender = Recording()
    pair = timed_turn(workload, contender, Turn(tmp_path, 4))
    assert seen == [0, 1, 1, 0] * 3 + [1, 0, 0, 1] * 3
    assert contender.events.count("step") == 12
    assert pair.alone > 0


def test_a_contender_that_reaches_into_other_loops_never_runs_beside_one(noted, tmp_path):
    workload, seen = noted
    contender = Reaching()
    timed_turn(workload, contender, Turn(tmp_path, 4))
    assert seen == [0] * 12
    assert contender.events.count("step") == 6


def test_the_bare_loop_runs_once_and_adds_nothing(noted, tmp_path):
    workload, seen = noted
    pair = timed_turn(workload, Contender(), Turn(tmp_path, 4))
    assert len(seen) == 6
    assert pair.added == 0.0
    assert pair.alone > 0


def test_every_visit_takes_time():
    times = visits([60_000, 0, 40_000])
    assert 0 < times.read < 1
    assert 0 < times.rows < 1
    assert 0 < times.histograms < 1
