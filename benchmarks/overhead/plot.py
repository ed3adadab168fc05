"""The results as a plot."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.overhead.scaling import Scaling
from forewarn.lab.bench.cells import BELOW_NOISE
from forewarn.lab.bench.measurements import Spread, WorkloadResult

LINEAR_BELOW = 1.0
"""Percent: below it the axis is linear, above it logarithmic."""
TICKS = (0, 1, 10, 100, 1000)


def draw(path: Path, results: Sequence[WorkloadResult], scalings: Sequence[Scaling]) -> None:
    """Write a PNG: a panel of bars with quartiles per workload, and a panel of points with their fit per axis.

    Raises ModuleNotFoundError if matplotlib is missing.
    """
    num_rows = max((len(result.costs) for result in results), default=8)
    num_panels = len(results) + len(scalings)
    matplotlib: Any = import_module("matplotlib.figure")
    figure = matplotlib.Figure(figsize=(7, num_panels * (1.2 + 0.28 * num_rows)), layout="constrained")
    panels = figure.subplots(num_panels, 1, squeeze=False)[:, 0]
    for result, panel in zip(results, panels, strict=False):
        _bars(panel, result)
    for scaling, panel in zip(scalings, panels[len(results) :], strict=True):
        _points(panel, scaling)
    figure.savefig(path, dpi=120)


def _bars(panel: Any, result: WorkloadResult) -> None:
    costs = [cost for cost in reversed(result.costs) if not cost.name.startswith("bare")]
    is_clear = [cost.added_share.median > result.noise for cost in costs]
    spreads = [cost.added_share if clear else Spread(0, 0, 0) for cost, clear in zip(costs, is_clear, strict=True)]
    medians = [100 * spread.median for spread in spreads]
    below = [100 * (spread.median - max(spread.low, 0)) for spread in spreads]
    above = [100 * (spread.high - spread.median) for spread in spreads]
    colours = ["tab:blue" if cost.name.startswith("forewarn") else "tab:grey" for cost in costs]
    panel.barh([cost.name for cost in costs], medians, xerr=(below, above), color=colours, error_kw={"capsize": 2})
    for place, clear in enumerate(is_clear):
        if not clear:
            panel.text(0, place, f" {BELOW_NOISE}", va="center", fontsize="small", color="dimgrey")
    panel.set_xscale("symlog", linthresh=LINEAR_BELOW)
    panel.set_xlim(left=0)
    panel.set_xticks(TICKS, list(map(str, TICKS)))
    panel.axvspan(0, 100 * result.noise, color="lightgrey", alpha=0.5, zorder=0)
    panel.set_title(result.name)
    panel.set_xlabel("added to the bare step, % of its CPU time (logarithmic above 1%)")


def _points(panel: Any, scaling: Scaling) -> None:
    x = list(scaling.sizes)
    panel.plot(x, [1e3 * seconds for seconds in scaling.measured_seconds], "o", color="tab:blue", label="in detail")
    brief = [max(0.0, 1e3 * seconds) for seconds in scaling.unmeasured_seconds]  # a negative time is noise
    panel.plot(x, brief, "o", color="tab:grey", label="in brief")
    ends = [min(x), max(x)]
    panel.plot(ends, [1e3 * (scaling.line.slope * size + scaling.line.intercept) for size in ends], color="tab:blue")
    panel.set_title(f"against {scaling.axis}, at {scaling.fixed} (R² {scaling.line.r_squared:.3f})")
    panel.set_xlabel(scaling.axis)
    panel.set_ylabel("ms added to a step")
    panel.legend()
