"""The results as a plot."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.overhead.scaling import Scaling
from forewarn.lab.bench.measurements import WorkloadResult

LINEAR_BELOW = 1.0
"""Percent: below it the axis is linear, above it logarithmic."""


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
    costs = [cost for cost in reversed(result.costs) if cost.name != "bare"]
    medians = [100 * cost.added_share.median for cost in costs]
    below = [100 * (cost.added_share.median - cost.added_share.low) for cost in costs]
    above = [100 * (cost.added_share.high - cost.added_share.median) for cost in costs]
    colours = ["tab:blue" if cost.name.startswith("forewarn") else "tab:grey" for cost in costs]
    panel.barh([cost.name for cost in costs], medians, xerr=(below, above), color=colours, error_kw={"capsize": 2})
    panel.set_xscale("symlog", linthresh=LINEAR_BELOW)
    panel.axvline(0, color="black", linewidth=0.8)
    panel.set_title(result.name)
    panel.set_xlabel("added to the bare step, % of its CPU time (logarithmic above 1%)")


def _points(panel: Any, scaling: Scaling) -> None:
    x = list(scaling.sizes)
    panel.plot(x, [1e3 * seconds for seconds in scaling.measured_seconds], "o", color="tab:blue", label="in detail")
    panel.plot(x, [1e3 * seconds for seconds in scaling.unmeasured_seconds], "o", color="tab:grey", label="in brief")
    ends = [min(x), max(x)]
    panel.plot(ends, [1e3 * (scaling.line.slope * size + scaling.line.intercept) for size in ends], color="tab:blue")
    panel.set_title(f"against {scaling.axis}, at {scaling.fixed} (R² {scaling.line.r_squared:.3f})")
    panel.set_xlabel(scaling.axis)
    panel.set_ylabel("ms added to a step")
    panel.legend()
