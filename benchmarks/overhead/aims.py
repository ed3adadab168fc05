"""The most that monitoring may cost, compared with what it was measured to cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from forewarn.lab.bench.cells import share, size
from forewarn.lab.bench.measurements import Cost, WorkloadResult

FULL, DEFAULT, BRIEF = "forewarn-full", "forewarn-default", "forewarn-every-step"

MOST_FULL = {"gpt12": 0.08, "tiny": 0.05}
"""Limit on detail on every step, as a share of the bare step."""
MOST_DEFAULT = 0.002
"""Limit on the default schedule, as a share of the bare step, in a loop that clips through the monitor, as here."""
MOST_READS, MOST_READS_WITH_HISTOGRAMS = 1.8, 3.5
"""Limits on one pass over the tensors, in streaming reads of the same numbers."""
LEAST_PARAMETERS = 5_000_000
"""Smallest model these limits apply to: in smaller ones the cost per tensor dominates."""
TIMES_CHEAPER = {
    "optimizer-metrics": {"gpt12": 4, "tiny": 15},
    "wandb": {"gpt12": 40, "tiny": 40},
    "torch-module-monitor": {"gpt12": 5, "tiny": 5},
}
"""How many times more the other tools should cost, each measuring on every step."""
MOST_BYTES = 10_000
"""Limit on the memory per tensor beyond that of a step without detail: sampled weights, and history for the rules."""

WORKLOADS = ("gpt6", "gpt12", "tiny")
"""The workloads that have aims; a model of the user's own has none."""

DETAIL, SCHEDULE, MEMORY = "detail on every step", "the default schedule", "memory per tensor, for detail"
COUNTING = "one visit, full histograms"

WHY_NOT = {
    DETAIL: "gradients and weights are both visited, for sums and for histograms of up to 65,536 values each, and the "
    "gradients of every block are followed. There is also a cost per tensor, which shows with tensors as small as in "
    "`tiny`. Python asks torch for the address, size, dtype and layout of each gradient and weight, and each is "
    "judged and recorded.",
    SCHEDULE: "a step without detail takes 0.5 to 1 ms, whatever the model: hooks, rules on loss and gradient norm, "
    "one row for the store. That is 0.2% of a step of 250 ms or more. On a busy machine it is also lost in the noise.",
    COUNTING: "counting every value is work for the processor, and faster memory does not shorten it. How many reads "
    "that is depends on how fast the memory of a shared machine is at that moment.",
    MEMORY: "the positions of 1,024 sampled weights take 4.1 kB. The readings and levels that rules look back on come "
    "on top, and so do series of the whole model, however few tensors share them.",
}
"""By aim, the reason why it can be missed."""


@dataclass(frozen=True, slots=True)
class Aim:
    """A target for one figure of one workload."""

    workload: str
    what: str
    wanted: str
    measured: str
    verdict: str
    """`yes`, `no`, or `in the noise` where the aim is within the quartiles or within the error of the benchmark."""

    @property
    def why_not(self) -> str:
        """Why aims of this kind can be missed."""
        return WHY_NOT.get(self.what, "")


def aims(results: Sequence[WorkloadResult]) -> list[Aim]:
    """Every aim that these results can decide."""
    return [aim for result in results if result.name in WORKLOADS for aim in _aims(result)]


def _aims(result: WorkloadResult) -> Iterator[Aim]:
    costs = {cost.name: cost for cost in result.costs}
    full, default = costs.get(FULL), costs.get(DEFAULT)
    again = costs.get("bare-again")
    error = 0.0 if again is None else max(abs(again.added_share.low), abs(again.added_share.high))
    if full is not None and result.name in MOST_FULL:
        yield _share(result, DETAIL, full, MOST_FULL[result.name], error)
    if default is not None:
        yield _share(result, SCHEDULE, default, MOST_DEFAULT, error)
    if full is None:
        return
    if result.num_parameters >= LEAST_PARAMETERS:
        yield _reads(result, "one visit of the tensors", result.visits.rows, MOST_READS)
        yield _reads(result, COUNTING, result.visits.histograms, MOST_READS_WITH_HISTOGRAMS)
    for name, factors in TIMES_CHEAPER.items():
        if name in costs and result.name in factors:
            yield _factor(result, full, costs[name], factors[result.name])
    brief = costs.get(BRIEF)
    held = (full.held_bytes - (0 if brief is None else brief.held_bytes)) / result.num_tensors
    yield Aim(result.name, MEMORY, f"below {size(MOST_BYTES)}", size(held), _word(held < MOST_BYTES))
    yield Aim(result.name, "syncs", "none", f"{full.syncs:.0f}", _word(full.syncs == 0))


def _share(result: WorkloadResult, what: str, cost: Cost, most: float, error: float) -> Aim:
    """`error` is the difference between two measurements of the bare loop."""
    added = cost.added_share
    unclear = added.low <= most < added.high or abs(added.median - most) <= error
    verdict = "in the noise" if unclear else _word(added.high <= most)
    return Aim(result.name, what, f"at most {share(most).lstrip('+')}", share(added.median), verdict)


def _reads(result: WorkloadResult, what: str, seconds: float, most: float) -> Aim:
    reads = seconds / result.visits.read
    return Aim(result.name, what, f"at most {most} reads", f"{reads:.2g} reads", _word(reads <= most))


def _factor(result: WorkloadResult, full: Cost, other: Cost, least: float) -> Aim:
    ours, theirs = full.added_seconds.median, other.added_seconds.median
    factor = f"{theirs / ours:.{1 if theirs < 10 * ours else 0}f} times" if ours > 0 else "no cost to compare with"
    reached = _word(ours <= 0 or theirs / ours >= least)
    return Aim(result.name, f"cheaper than {other.name}", f"{least} times", factor, reached)


def _word(reached: bool) -> str:
    return "yes" if reached else "no"
