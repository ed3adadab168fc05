"""Verdicts on the aims follow from the measurements, and are never better than them."""

from dataclasses import replace

import pytest

from benchmarks.overhead.aims import aims
from forewarn.lab.bench.measurements import Cost, Spread
from tests.lab.bench.conftest import workload_result


def cost(name, share, *, around=0.0, seconds=1e-3, reads=1.0, held=1000):
    spread = Spread(share, share - around, share + around)
    return Cost(name, "", spread, Spread(seconds, seconds, seconds), reads, 3, 0, held)


def verdicts(*costs, workload="gpt12"):
    return {aim.what: aim.verdict for aim in aims([workload_result(workload, *costs)])}


@pytest.mark.parametrize(("share", "around", "verdict"), [
    (0.05, 0.01, "yes"), (0.09, 0.005, "no"), (0.079, 0.01, "in the noise"), (0.085, 0.01, "in the noise"),
])  # fmt: skip
def test_a_share_is_judged_with_its_spread(share, around, verdict):
    assert verdicts(cost("forewarn-full", share, around=around))["detail on every step"] == verdict


def test_no_verdict_is_finer_than_the_error_of_the_benchmark():
    again = cost("bare-again", 0.0, around=0.03)
    by_aim = verdicts(cost("forewarn-full", 0.12), cost("forewarn-default", -0.02), again)
    assert by_aim["detail on every step"] == "no"
    assert by_aim["the default schedule"] == "in the noise"


def test_others_are_compared_on_the_same_workload():
    full = cost("forewarn-full", 0.05, seconds=1e-3)
    by_aim = verdicts(full, cost("wandb", 1.0, seconds=39e-3), cost("optimizer-metrics", 0.2, seconds=4.5e-3))
    assert by_aim["cheaper than wandb"] == "no"
    assert by_aim["cheaper than optimizer-metrics"] == "yes"
    assert "cheaper than torch-module-monitor" not in by_aim


def test_memory_is_per_tensor():
    assert verdicts(cost("forewarn-full", 0.05, held=99_999))["memory per tensor, for detail"] == "yes"
    assert verdicts(cost("forewarn-full", 0.05, held=100_001))["memory per tensor, for detail"] == "no"
    brief = cost("forewarn-every-step", 0.0, held=500_000)
    assert verdicts(cost("forewarn-full", 0.05, held=599_999), brief)["memory per tensor, for detail"] == "yes"


def test_a_sync_is_a_missed_aim():
    assert verdicts(replace(cost("forewarn-full", 0.05), syncs=1.0))["syncs"] == "no"


def test_what_is_missed_has_a_reason():
    missed = aims([workload_result("tiny", cost("forewarn-full", 0.2), cost("forewarn-default", 0.1))])
    assert all(aim.why_not for aim in missed if aim.verdict == "no")


def test_a_model_of_the_users_own_has_no_aims():
    assert aims([workload_result("mine:make", cost("forewarn-full", 0.2))]) == []


def test_a_workload_without_forewarn_has_no_aims():
    assert aims([workload_result("gpt12", cost("bare", 0.0), cost("wandb", 1.0))]) == []


def test_a_visit_is_judged_in_streaming_reads_where_a_model_is_large():
    full = cost("forewarn-full", 0.05)
    by_aim = {aim.what: aim.verdict for aim in aims([workload_result("gpt12", full, num_parameters=5_000_000)])}
    assert by_aim["one visit of the tensors"] == "yes"
    assert by_aim["one visit, full histograms"] == "no"
    assert "one visit of the tensors" not in verdicts(full)
