"""Rules about ranks, on plain numbers."""

import numpy as np
import pytest

from forewarn.types import Severity
from tests.judge.rules.runs import Run


def by_rank(*values):
    return {f"rank_{rank}": value for rank, value in enumerate(values)}


def feed_seconds(run, data, step=(0.3, 0.3, 0.3)):
    run.feed({
        "rank/step_seconds": by_rank(*step), "rank/data_seconds": by_rank(*data),
        "rank/forward_seconds": by_rank(0.1, 0.1, 0.1), "rank/update_seconds": by_rank(0.0, 0.0, 0.0),
    })  # fmt: skip


def test_a_rank_that_is_slow_once_holds_nobody_up():
    run = Run("R102")
    for data in ((0.01, 0.2, 0.01), (0.01, 0.01, 0.01), (0.2, 0.01, 0.01), (0.01, 0.2, 0.01)):
        feed_seconds(run, data)
    assert run.codes == set()
    feed_seconds(run, (0.01, 0.2, 0.01))
    (alert,) = run.ledger.firing
    assert (alert.scope, alert.severity) == ("rank_1", Severity.WARNING)
    assert alert.finding.value == pytest.approx(0.19 / 0.3)


def test_a_rank_that_takes_twice_as_long_is_named_however_uneven_its_steps_are():
    run = Run("R102")
    for longer in (0.0, 0.0, 0.24, 0.36):
        assert run.codes == set()
        feed_seconds(run, (0.01, 0.01 + longer, 0.01), step=[0.3 + longer] * 3)
    (alert,) = run.ledger.firing
    assert (alert.scope, alert.fired) == ("rank_1", 3)


def test_ranks_that_are_all_slow_are_no_stragglers():
    run = Run("R102")
    for _ in range(4):
        feed_seconds(run, (0.25, 0.26, 0.24))
    assert run.codes == set()


def test_a_tenth_of_a_second_in_a_minute_is_no_straggler_and_neither_is_a_millisecond():
    run = Run("R102")
    for _ in range(4):
        feed_seconds(run, (0.01, 0.11, 0.01), step=(60.0, 60.0, 60.0))
    for _ in range(4):
        feed_seconds(run, (0.001, 0.004, 0.001), step=(0.005, 0.005, 0.005))
    assert run.codes == set()


def test_a_loss_that_is_non_finite_everywhere_is_not_of_one_rank():
    run = Run("R103")
    run.feed({"rank/loss": by_rank(2.0, 2.0, 2.0)})
    run.feed({"rank/loss": by_rank(np.nan, np.nan, np.inf)})
    assert run.codes == set()
    run.feed({"rank/loss": by_rank(2.0, 2.0, np.inf)})
    assert [alert.scope for alert in run.ledger.firing] == ["rank_2"]


def test_losses_of_small_batches_are_apart_only_if_they_stay_so():
    noise = np.random.default_rng(0)
    run = Run("R104")
    for _ in range(100):
        run.feed({"rank/loss": by_rank(*(2.0 + noise.normal(0, 0.8, 3)))})
    assert run.codes == set()
    for _ in range(100):
        run.feed({"rank/loss": by_rank(*(2.0 + noise.normal(0, 0.1, 3) + [0, 0, 1.0]))})
    assert [alert.scope for alert in run.ledger.firing] == ["rank_2"]
