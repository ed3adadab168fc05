"""The results as a Markdown page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.overhead.aims import aims
from benchmarks.overhead.scaling import Scaling, scaling_sentence
from forewarn.lab.bench import cells as wording
from forewarn.lab.bench.measurements import Machine, WorkloadResult

LEGEND = {
    "added to a step": "CPU time of the process, all threads, beyond the bare step that runs beside each step. "
    "Halfway, the two swap models, because where a model lies in memory changes its speed. A contender that reaches "
    "into other loops runs after the bare loop instead, with the same model. Median over rounds. Work that a "
    "contender does once in N steps counts 1/N. Other processes do not count, nor does work left to the end of a run.",
    "half of all rounds": "the quartiles. `bare-again` shows the error of the method.",
    "× read": "the added time, in streaming reads of as many numbers as the gradients hold, from contiguous memory.",
    "operations": "torch operations that the training thread adds per step, counted in a separate pass.",
    "syncs": "the operations that would wait for an accelerator. Transfers by `.cpu()` or `.numpy()` do not show on a "
    "CPU, so this is a lower bound.",
    "memory": "extra bytes held after one turn: tensors known to the garbage collector, and what Python and numpy have "
    "kept since the contender was attached (tracemalloc).",
}
"""What each column means."""


def page(
    command: str,
    machine: Machine,
    results: Sequence[WorkloadResult],
    scalings: Sequence[Scaling],
    picture: str | None,
) -> str:
    """Markdown with one table per workload; `picture` is the name of a plot beside it."""
    return "\n".join(_lines(command, machine, results, scalings, picture)) + "\n"


def _lines(
    command: str,
    machine: Machine,
    results: Sequence[WorkloadResult],
    scalings: Sequence[Scaling],
    picture: str | None,
) -> Iterator[str]:
    yield "# What watching a training loop costs"
    yield ""
    yield f"Written by `{command}`."
    for sentence in wording.machine_sentences(machine):
        yield ""
        yield sentence
    if picture is not None:
        yield ""
        yield f"![Added CPU time of each contender]({picture})"
    yield from _aims(results)
    for result in results:
        yield from _workload(result)
    if scalings:
        yield from _scalings(scalings)
    if results:
        yield from _explained(results)


def _aims(results: Sequence[WorkloadResult]) -> Iterator[str]:
    decided = aims(results)
    if not decided:
        return
    yield from ("", "## What was aimed at", "")
    yield "Medians over rounds. Where an aim lies between their quartiles, or no further from the median than the bare"
    yield "loop from itself, it is in the noise: neither reached nor missed."
    yield ""
    rows = [(aim.workload, aim.what, aim.wanted, aim.measured, aim.verdict) for aim in decided]
    yield from _table(("workload", "what", "aim", "measured", "reached"), rows)
    reasons = {aim.what: aim.why_not for aim in decided if aim.verdict != "yes" and aim.why_not}
    if reasons:
        yield from ("", "Why some are not reached:", "")
        yield from (f"- {what}: {why}" for what, why in reasons.items())


def _workload(result: WorkloadResult) -> Iterator[str]:
    yield from ("", f"## {result.name}", "", wording.heading(result), "")
    yield from _table(wording.COLUMNS, [wording.cells(cost) for cost in result.costs])
    if result.judging is not None:
        yield from ("", wording.judging_sentence(result.judging))
    if result.absent:
        yield from ("", "Not in the table:", "")
        yield from (f"- {absent.name}: {_one_line(absent.reason)}" for absent in result.absent)


def _scalings(scalings: Sequence[Scaling]) -> Iterator[str]:
    yield from ("", "## How it scales", "")
    yield "CPU time that forewarn adds to clipping and optimizer step, on steps measured in detail and in brief."
    for scaling in scalings:
        yield from ("", scaling_sentence(scaling), "")
        rows = zip(scaling.sizes, scaling.measured_seconds, scaling.unmeasured_seconds, strict=True)
        yield from _table(
            (scaling.axis, "in detail", "in brief"),
            [(f"{count:,}", wording.duration(detailed), wording.duration(brief)) for count, detailed, brief in rows],
        )


def _explained(results: Sequence[WorkloadResult]) -> Iterator[str]:
    yield from ("", "## What the columns mean", "")
    yield from (f"- {column}: {meaning}" for column, meaning in LEGEND.items())
    yield from ("", "## What each contender does", "")
    described: dict[str, str] = {}
    for result in results:
        described |= {cost.name: cost.description for cost in result.costs}
        described |= {absent.name: absent.description for absent in result.absent}
    yield from (f"- `{name}`: {description}" for name, description in described.items())


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(columns)} |"
    yield f"|---|{'---:|' * (len(columns) - 1)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"


def _one_line(text: str) -> str:
    return " ".join(text.split())
