"""Like for like: for each other tool, forewarn set to the nearest equal set of statistics, on the same steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from forewarn.lab.bench.measurements import Cost, Spread, WorkloadResult
from forewarn.lab.bench.tiers import Forewarn
from forewarn.measure.options import Measure

EVERYTHING = 10**9
"""More rows than any output has: outputs are read whole, as others read them, instead of a sample."""
_TENSORS = "norm, mean, std, min, max, zero fraction and non-finite count of every gradient and weight"
_OUTPUTS = (
    "mean, std, min, max, zero fraction, kurtosis and non-finite count of every module's output, dead and saturated "
    "units, logits and batches"
)

MATCHES = {
    "torch-module-monitor-tensors": "forewarn-tensors",
    "torch-module-monitor-outputs": "forewarn-outputs",
    "wandb": "forewarn-histograms",
    "tensorboard-scalars": "forewarn-tensors",
    "tensorboard-histograms": "forewarn-gradient-histograms",
    "optimizer-metrics": "forewarn-updates",
    "torchmortem": "forewarn-outputs",
    "trainscope": "forewarn-outputs",
    "pulsegrad": "forewarn-outputs-10",
}
"""By tool: the contender of forewarn that computes what it does, or more."""


def matched() -> list[Forewarn]:
    """forewarn with the statistics that each of the other tools computes."""
    tensors = Measure(updates=False, histograms="off", gain=False, activations=False, attention=False)
    outputs = Measure(
        updates=False, histograms="off", gain=False, attention=False, modules=".", activation_rows=EVERYTHING
    )
    histograms = Measure(updates=False, histograms="full", gain=False, activations=False, attention=False)
    of_gradients = Measure(
        updates=False, weights=False, histograms="full", gain=False, activations=False, attention=False
    )
    updates = Measure(weights=False, histograms="off", gain=False, activations=False, attention=False)
    settings = {
        "forewarn-tensors": (tensors, _TENSORS),
        "forewarn-outputs": (outputs, f"{_TENSORS}; {_OUTPUTS}"),
        "forewarn-histograms": (histograms, f"{_TENSORS}; a full histogram, percentiles and shape of each"),
        "forewarn-gradient-histograms": (of_gradients, "statistics, full histogram and shape of every gradient"),
        "forewarn-updates": (updates, "statistics of every gradient; update norm, ratio and cause of standstill"),
    }
    every_step = [
        Forewarn(name, f"{statistics}; recorded and judged", lambda turn, step: True, measure=measure)
        for name, (measure, statistics) in settings.items()
    ]
    one_in_ten = Forewarn(
        "forewarn-outputs-10", "as forewarn-outputs, on one step in 10", lambda turn, step: turn.is_rare(step), 10,
        measure=outputs,
    )  # fmt: skip
    return [*every_step, one_in_ten]


@dataclass(frozen=True, slots=True)
class Comparison:
    """What another tool adds to a step, and what forewarn adds for the same statistics."""

    theirs: Cost
    ours: Cost
    times: Spread
    """How many times as much the other adds. The range is that of the quartiles of both, at worst and at best."""
    is_clear: bool
    """Whether forewarn adds more than the error of the method; otherwise the median is a lower bound."""


def comparisons(result: WorkloadResult) -> Iterator[Comparison]:
    """Every pair of contenders that computed the same."""
    costs = {cost.name: cost for cost in result.costs}
    least = result.noise * result.bare_seconds.median
    for name, match in MATCHES.items():
        if name in costs and match in costs:
            theirs, ours = costs[name], costs[match]
            added = ours.added_seconds
            is_clear = added.median > least
            floor = max(least, 1e-9)
            times = Spread(
                theirs.added_seconds.median / max(added.median, floor),
                theirs.added_seconds.low / max(added.high, floor),
                theirs.added_seconds.high / max(added.low, floor),
            )
            yield Comparison(theirs, ours, times, is_clear)
