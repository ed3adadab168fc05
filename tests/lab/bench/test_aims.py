"""The aims are told from what was measured, and never better than it was."""

from dataclasses import replace

import pytest

from forewarn.lab.bench.aims import aims
from forewarn.lab.bench.cells import heading
from forewarn.lab.bench.measurements import Cost, Spread, Visits, WorkloadResult


def cost(name, share, *, around=0.0, seconds=1e-3, reads=1.0, held=1000):
    spread = Spread(share, share - around, share + around)
    return Cost(name, "", spread, Spread(seconds, seconds, seconds), reads, 3, 0, held)


def result(name, *costs, num_parameters=10):
    one = Spread(0.1, 0.1, 0.1)
    return WorkloadResult(
        name, "", num_parameters=num_parameters, num_tensors=10, optimizer="AdamW", rounds=3, steps=3, bare_seconds=one,
        bare_operations=1, bare_syncs=0, visits=Visits(1e-3, 1.7e-3, 3.6e-3), backend="native", costs=costs,
        judging=None, absent=(),
    )  # fmt: skip


def verdicts(*costs, workload="gpt12"):
    return {aim.what: aim.verdict for aim in aims([result(workload, *costs)])}


@pytest.mark.parametrize(("share", "around", "verdict"), [
    (0.05, 0.01, "yes"), (0.09, 0.005, "no"), (0.079, 0.01, "in the noise"), (0.085, 0.01, "in the noise"),
])  # fmt: skip
def test_a_share_is_judged_with_its_spread(share, around, verdict):
    assert verdicts(cost("forewarn-full", share, around=around))["detail on every step"] == verdict


def test_no_verdict_is_finer_than_the_error_of_the_benchmark():
    again = cost("bare-again", 0.0, around=0.03)
    found = verdicts(cost("forewarn-full", 0.12), cost("forewarn-default", -0.02), again)
    assert found["detail on every step"] == "no"
    assert found["the default schedule"] == "in the noise"


def test_others_are_compared_on_the_same_workload():
    full = cost("forewarn-full", 0.05, seconds=1e-3)
    found = verdicts(full, cost("wandb", 1.0, seconds=39e-3), cost("optimizer-metrics", 0.2, seconds=4.5e-3))
    assert found["cheaper than wandb"] == "no"
    assert found["cheaper than optimizer-metrics"] == "yes"
    assert "cheaper than torch-module-monitor" not in found


def test_memory_is_per_tensor():
    assert verdicts(cost("forewarn-full", 0.05, held=99_999))["memory per tensor, for detail"] == "yes"
    assert verdicts(cost("forewarn-full", 0.05, held=100_001))["memory per tensor, for detail"] == "no"
    brief = cost("forewarn-every-step", 0.0, held=500_000)
    assert verdicts(cost("forewarn-full", 0.05, held=599_999), brief)["memory per tensor, for detail"] == "yes"


def test_a_sync_is_a_missed_aim():
    assert verdicts(replace(cost("forewarn-full", 0.05), syncs=1.0))["syncs"] == "no"


def test_what_is_missed_has_a_reason():
    missed = aims([result("tiny", cost("forewarn-full", 0.2), cost("forewarn-default", 0.1))])
    assert all(aim.why_not for aim in missed if aim.verdict == "no")


def test_a_model_of_the_users_own_has_no_aims():
    assert aims([result("mine:make", cost("forewarn-full", 0.2))]) == []


def test_a_workload_without_forewarn_has_no_aims():
    assert aims([result("gpt12", cost("bare", 0.0), cost("wandb", 1.0))]) == []


def test_one_round_is_not_rounds():
    assert "1 round of 3 timed steps with either of two models." in heading(replace(result("gpt12"), rounds=1))
    assert "3 rounds of 3 timed steps with either of two models." in heading(result("gpt12"))


def test_a_visit_is_judged_in_streaming_reads_where_a_model_is_large():
    full = cost("forewarn-full", 0.05)
    found = {aim.what: aim.verdict for aim in aims([result("gpt12", full, num_parameters=5_000_000)])}
    assert found["one visit of the tensors"] == "yes"
    assert found["one visit, full histograms"] == "no"
    assert "one visit of the tensors" not in verdicts(full)
