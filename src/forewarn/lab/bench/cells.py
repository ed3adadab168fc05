"""Results in words: the same cells for the terminal and for the page."""

from __future__ import annotations

from forewarn.lab.bench.machine import Machine
from forewarn.lab.bench.measurements import Cost, Judging, Scaling, Spread, WorkloadResult

COLUMNS = (
    "contender",
    "added to a step",
    "half of all rounds",
    "added time",
    "× read",
    "operations",
    "syncs",
    "memory",
)

CPU_ONLY = "All figures are of a CPU with one torch thread. They say nothing about an accelerator."

LEGEND = {
    "added to a step": "CPU time of the process, all threads, beyond the bare step that runs beside each step; halfway "
    "the two change models, for one is slower than another by where its memory lies. A contender that reaches into "
    "other loops runs after the bare loop instead, with the same model. Median over rounds. Work that a contender does "
    "once in N steps counts one N-th. Other processes do not count, nor does what is left to the end of a run.",
    "half of all rounds": "the quartiles; `bare-again` shows what the method is off by.",
    "× read": "the added time in streaming reads of as many numbers as the gradients hold, from memory in one piece.",
    "operations": "torch operations added per step by the training thread, counted in a pass of its own.",
    "syncs": "those among them that would wait for an accelerator; transfers by `.cpu()` or `.numpy()` do not show on "
    "a CPU, so this is the least.",
    "memory": "bytes held in addition after one turn: tensors known to the garbage collector, and what Python and "
    "numpy have kept since the contender was attached (tracemalloc).",
}
"""What each column means."""


_UNITS = (("s", 1.0), ("ms", 1e3), ("µs", 1e6))
_SIZES = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1.0))


def duration(seconds: float) -> str:
    """A time in the unit that suits it."""
    unit, factor = next(((unit, factor) for unit, factor in _UNITS if abs(seconds) * factor >= 0.9995), _UNITS[-1])
    return _signed(f"{seconds * factor:.3g} {unit}")


def share(value: float) -> str:
    """A difference in percent, with its sign; as many digits as mean something."""
    percent = 100 * value
    digits = 0 if abs(percent) >= 20 else 1
    text = f"{percent:+.{digits}f}%"
    return _signed(text) if float(text[:-1]) else "0%"


def size(num_bytes: float) -> str:
    """An amount of memory."""
    unit, factor = next(((unit, factor) for unit, factor in _SIZES if abs(num_bytes) >= factor), _SIZES[-1])
    return _signed(f"{num_bytes / factor:.3g} {unit}")


def _signed(text: str) -> str:
    return text.replace("-", "−")


def between(spread: Spread) -> str:
    """The quartiles of a share."""
    return f"{share(spread.low)} to {share(spread.high)}"


def cells(cost: Cost) -> tuple[str, ...]:
    """One row of the table."""
    if cost.added_seconds == Spread(0.0, 0.0, 0.0):  # the bare loop beside itself
        return (cost.name, "0%", "", "", "", "0", "0", "")
    return (
        cost.name,
        share(cost.added_share.median),
        between(cost.added_share),
        duration(cost.added_seconds.median),
        _signed(f"{cost.reads:.2g}" if abs(cost.reads) < 100 else f"{cost.reads:.0f}"),
        f"{cost.operations:.0f}" if cost.operations >= 10 else f"{cost.operations:.2g}",
        f"{round(cost.syncs)}",
        size(cost.held_bytes),
    )


def heading(result: WorkloadResult) -> str:
    """What was trained, and how long its bare step takes."""
    spread = result.bare_seconds
    text = (
        f"{result.description}; {result.num_parameters:,} parameters in {result.num_tensors} tensors, "
        f"{result.optimizer}. The bare step takes {duration(spread.median)} ({duration(spread.low)} to "
        f"{duration(spread.high)}) in {result.bare_operations:.0f} operations. One streaming read of as many numbers "
        f"takes {duration(result.visits.read)}, one visit of the tensors by forewarn's engine "
        f"{duration(result.visits.rows)}, with full histograms {duration(result.visits.histograms)}. "
        f"{result.rounds} round{'s' * (result.rounds > 1)} of "
        f"{result.steps} timed step{'s' * (result.steps > 1)} with either of two models."
    )
    return text + (f" forewarn read the tensors by its {result.backend} backend." if result.backend else "")


def judging_sentence(judging: Judging) -> str:
    """The part of forewarn's cost that is judging."""
    kinds = (("measured in detail", judging.measured), ("measured in brief", judging.unmeasured))
    parts = [
        f"{duration(spread.median)} ({duration(spread.low)} to {duration(spread.high)}) on a step {kind}"
        for kind, spread in kinds
        if spread is not None
    ]
    return f"Of this, judging by all rules takes {' and '.join(parts)}, with {judging.depth} steps to look back on."


def scaling_sentence(scaling: Scaling) -> str:
    """The line through the points of one axis."""
    unit = "element" if scaling.axis == "elements" else "tensor"
    slope = scaling.line.slope
    per = f"{slope * 1e9:.3g} ns" if abs(slope) < 1e-6 else duration(slope)
    text = (
        f"Against {scaling.axis}, at {scaling.fixed}: {per} per {unit} and {duration(scaling.line.intercept)} besides "
        f"(R² {scaling.line.r_squared:.4f})."
    )
    if scaling.left_out:
        text += f" Left out for want of memory: {', '.join(f'{count:,}' for count in scaling.left_out)} {scaling.axis}."
    return text


def machine_sentences(machine: Machine) -> list[str]:
    """Where it ran, and what that means for the figures."""
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    load = "unknown" if machine.load is None else f"{machine.load:.2g}"
    lines = [
        f"{machine.processor}, {machine.cores} cores, {size(machine.memory_bytes)} of memory, load average {load} at "
        f"the start, {machine.date}; {versions}."
    ]
    if machine.is_shared:
        lines.append(
            "The machine was shared with other work, as its load average shows: compare figures within a table, and "
            "look at the spread."
        )
    return [*lines, CPU_ONLY]
