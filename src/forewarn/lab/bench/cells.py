"""Results as text: the terminal and the page print the same cells and sentences."""

from __future__ import annotations

from forewarn.lab.bench.measurements import Cost, Judging, Machine, Spread, WorkloadResult

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

BELOW_NOISE = "below noise"

_UNITS = (("s", 1.0), ("ms", 1e3), ("µs", 1e6))
_SIZES = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1.0))


def duration(seconds: float) -> str:
    """A time in seconds, milliseconds or microseconds, whichever suits its size."""
    unit, factor = next(((unit, factor) for unit, factor in _UNITS if abs(seconds) * factor >= 0.9995), _UNITS[-1])
    return _signed(f"{seconds * factor:.3g} {unit}")


def share(value: float) -> str:
    """A signed percentage with at most one decimal."""
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


def cells(cost: Cost, noise: float = 0.0) -> tuple[str, ...]:
    """One row of the table. What is not above the noise, a share of the bare step, is not given as a number."""
    if cost.added_seconds == Spread(0.0, 0.0, 0.0):  # the bare loop beside itself
        return (cost.name, "0%", "", "", "", "0", "0", "")
    is_clear = cost.added_share.median > noise
    return (
        cost.name,
        share(cost.added_share.median) if is_clear else BELOW_NOISE,
        between(cost.added_share),
        duration(cost.added_seconds.median) if is_clear else "",
        (f"{cost.reads:.2g}" if abs(cost.reads) < 100 else f"{cost.reads:.0f}") if is_clear else "",
        f"{cost.operations:.0f}" if cost.operations >= 10 else f"{cost.operations:.2g}",
        f"{round(cost.syncs)}",
        size(cost.held_bytes),
    )


def heading(result: WorkloadResult) -> str:
    """The model that was trained, how long its bare step takes, and how it was measured."""
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
    """How much of forewarn's cost comes from judging, in the tiers with everything that is measured by default."""
    kinds = (("measured in detail", judging.measured), ("measured in brief", judging.unmeasured))
    parts = [
        f"{duration(spread.median)} ({duration(spread.low)} to {duration(spread.high)}) on a step {kind}"
        for kind, spread in kinds
        if spread is not None
    ]
    times = " and ".join(parts)
    return f"With the default measurements, judging by all rules takes {times}, with {judging.depth} steps in memory."


def machine_sentences(machine: Machine) -> list[str]:
    """Where the benchmark ran, and what that means for its figures."""
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
