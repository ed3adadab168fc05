"""Verdicts on the aims follow from the measurements, and are never better than them."""

from dataclasses import replace

import pytest

from benchmarks.overhead.aims import aims, factor
from benchmarks.overhead.matches import comparisons
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


def test_others_are_compared_with_the_same_statistics_on_the_same_workload():
    ours = [
        cost("forewarn-histograms", 0.05),
        cost("forewarn-updates", 0.05),
        cost("forewarn-full", 0.01, seconds=1e-6),
    ]
    by_aim = verdicts(*ours, cost("wandb", 1.0, seconds=39e-3), cost("optimizer-metrics", 0.2, seconds=4.5e-3))
    assert by_aim["cheaper than wandb, like for like"] == "no"
    assert by_aim["cheaper than optimizer-metrics, like for like"] == "yes"
    assert not [what for what in by_aim if "torch-module-monitor" in what]


def test_a_factor_within_the_quartiles_of_both_is_in_the_noise():
    theirs = replace(cost("torch-module-monitor-tensors", 0.3), added_seconds=Spread(6e-3, 5e-3, 7e-3))
    ours = replace(cost("forewarn-tensors", 0.05), added_seconds=Spread(1e-3, 0.9e-3, 1.1e-3))
    (comparison,) = comparisons(workload_result("gpt12", theirs, ours))
    assert comparison.times == Spread(pytest.approx(6.0), pytest.approx(5 / 1.1), pytest.approx(7 / 0.9))
    assert verdicts(theirs, ours)["cheaper than torch-module-monitor-tensors, like for like"] == "in the noise"


def test_what_is_below_the_noise_makes_no_infinite_factor():
    result = workload_result(
        "gpt12", cost("bare-again", 0.0, around=0.02), cost("torch-module-monitor-tensors", 0.3, seconds=30e-3),
        cost("forewarn-tensors", -0.01, seconds=-1e-3),
    )  # fmt: skip
    (comparison,) = comparisons(result)
    least = 30e-3 / (0.02 * result.bare_seconds.median)
    assert factor(comparison) == f"more than {least:.{1 if least < 10 else 0}f} times"


def test_a_step_without_detail_is_judged_in_seconds():
    assert verdicts(cost("forewarn-every-step", 0.5, seconds=0.09e-3), workload="mlp")["a step without detail"] == "yes"
    assert verdicts(cost("forewarn-every-step", 0.5, seconds=0.4e-3), workload="mlp")["a step without detail"] == "no"


def test_memory_is_per_tensor():
    assert verdicts(cost("forewarn-full", 0.05, held=99_999))["memory per tensor, for detail"] == "yes"
    assert verdicts(cost("forewarn-full", 0.05, held=100_001))["memory per tensor, for detail"] == "no"
    brief = cost("forewarn-every-step", 0.0, held=500_000)
    assert verdicts(cost("forewarn-full", 0.05, held=599_999), brief)["memory per tensor, for detail"] == "yes"


def test_a_sync_is_a_missed_aim():
    assert verdicts(replace(cost("forewarn-full", 0.05), syncs=1.0))["syncs"] == "no"


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
