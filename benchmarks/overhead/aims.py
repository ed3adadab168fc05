"""The most that monitoring may cost, compared with what it was measured to cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.overhead.matches import Comparison, comparisons
from forewarn.lab.bench.cells import duration, share, size
from forewarn.lab.bench.measurements import Cost, WorkloadResult

FULL, DEFAULT, BRIEF = "forewarn-full", "forewarn-default", "forewarn-every-step"

MOST_FULL = {"gpt12": 0.08, "tiny": 0.05}
"""Limit on detail on every step, as a share of the bare step."""
MOST_DEFAULT = 0.002
"""Limit on the default schedule, as a share of the bare step, in a loop that clips through the monitor, as here."""
LEAST_STEP_SECONDS = 0.1
"""Shortest bare step that this limit applies to; shorter ones have the limit in seconds."""
MOST_BRIEF_SECONDS = 1e-4
"""Limit on a step that is not measured in detail."""
MOST_READS, MOST_READS_WITH_HISTOGRAMS = 1.8, 3.5
"""Limits on one pass over the tensors, in streaming reads of the same numbers."""
LEAST_PARAMETERS = 5_000_000
"""Smallest model these limits apply to: in smaller ones the cost per tensor dominates."""
TIMES_CHEAPER = {
    "torch-module-monitor-tensors": 5, "torch-module-monitor-outputs": 5, "wandb": 40, "optimizer-metrics": 4,
}  # fmt: skip
"""How many times as much the other tools should cost, for the same statistics on every step."""
MOST_BYTES = 10_000
"""Limit on the memory per tensor beyond that of a step without detail: sampled weights, and history for the rules."""

WORKLOADS = ("gpt6", "gpt12", "tiny", "modules", "resnet", "encoder", "mlp")
"""The workloads that have aims; a model of the user's own has none."""


@dataclass(frozen=True, slots=True)
class Aim:
    """A target for one figure of one workload."""

    workload: str
    what: str
    wanted: str
    measured: str
    verdict: str
    """`yes`, `no`, or `in the noise` where the aim is within the quartiles or within the error of the benchmark."""


def aims(results: Sequence[WorkloadResult]) -> list[Aim]:
    """Every aim that these results can decide."""
    return [aim for result in results if result.name in WORKLOADS for aim in _aims(result)]


def _aims(result: WorkloadResult) -> Iterator[Aim]:
    costs = {cost.name: cost for cost in result.costs}
    for comparison in comparisons(result):
        if comparison.theirs.name in TIMES_CHEAPER:
            yield _factor(result, comparison, TIMES_CHEAPER[comparison.theirs.name])
    brief, full, default = costs.get(BRIEF), costs.get(FULL), costs.get(DEFAULT)
    if brief is not None:
        yield _seconds(result, brief, MOST_BRIEF_SECONDS)
    if full is not None and result.name in MOST_FULL:
        yield _share(result, "detail on every step", full, MOST_FULL[result.name])
    if default is not None and result.bare_seconds.median >= LEAST_STEP_SECONDS:
        yield _share(result, "the default schedule", default, MOST_DEFAULT)
    if full is None:
        return
    if result.num_parameters >= LEAST_PARAMETERS:
        yield _reads(result, "one visit of the tensors", result.visits.rows, MOST_READS)
        yield _reads(result, "one visit, full histograms", result.visits.histograms, MOST_READS_WITH_HISTOGRAMS)
    held = (full.held_bytes - (0 if brief is None else brief.held_bytes)) / result.num_tensors
    memory = "memory per tensor, for detail"
    yield Aim(result.name, memory, f"below {size(MOST_BYTES)}", size(held), _word(held < MOST_BYTES))
    yield Aim(result.name, "syncs", "none", f"{full.syncs:.0f}", _word(full.syncs == 0))


def _share(result: WorkloadResult, what: str, cost: Cost, most: float) -> Aim:
    added, error = cost.added_share, result.noise
    unclear = added.median < 0 or added.low <= most < added.high or abs(added.median - most) <= error
    verdict = "in the noise" if unclear else _word(added.high <= most)
    return Aim(result.name, what, f"at most {share(most).lstrip('+')}", share(added.median), verdict)


def _seconds(result: WorkloadResult, cost: Cost, most: float) -> Aim:
    added, error = cost.added_seconds, result.noise * result.bare_seconds.median
    unclear = added.median < 0 or added.low <= most < added.high or abs(added.median - most) <= error
    verdict = "in the noise" if unclear else _word(added.high <= most)
    return Aim(result.name, "a step without detail", f"at most {duration(most)}", duration(added.median), verdict)


def _reads(result: WorkloadResult, what: str, seconds: float, most: float) -> Aim:
    reads = seconds / result.visits.read
    return Aim(result.name, what, f"at most {most} reads", f"{reads:.2g} reads", _word(reads <= most))


def _factor(result: WorkloadResult, comparison: Comparison, least: float) -> Aim:
    times = comparison.times
    unclear = times.low < least <= times.high
    verdict = "in the noise" if unclear else _word(times.low >= least)
    what = f"cheaper than {comparison.theirs.name}, like for like"
    return Aim(result.name, what, f"{least} times", factor(comparison), verdict)


def factor(comparison: Comparison) -> str:
    """`4.2 times`; `more than 12 times` if what forewarn adds is below the noise."""
    times = comparison.times.median
    if times < 0:
        return "below noise"
    words = f"{times:.{1 if times < 10 else 0}f} times"
    return words if comparison.is_clear else f"more than {words}"


def _word(reached: bool) -> str:
    return "yes" if reached else "no"
