"""The results as a Markdown page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.overhead.aims import aims, factor
from benchmarks.overhead.families import FAMILIES, FamilyCosts
from benchmarks.overhead.lineup import all_contenders
from benchmarks.overhead.matches import MATCHES, comparisons
from benchmarks.overhead.scaling import Scaling, scaling_sentence
from forewarn.lab.bench import cells as wording
from forewarn.lab.bench.measurements import Machine, WorkloadResult

LEGEND = {
    "added to a step": "CPU time of the process, all threads, beyond the bare step that runs beside each step. "
    "Halfway, the two swap models, because where a model lies in memory changes its speed. A contender that reaches "
    "into other loops runs after the bare loop instead, with the same model. Median over rounds. Work that a "
    "contender does once in N steps counts 1/N. Other processes do not count, nor does work left to the end of a run.",
    "half of all rounds": "the quartiles. `bare-again` shows the error of the method: what is not above it is below "
    "noise.",
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
    families: Sequence[FamilyCosts] = (),
) -> str:
    """Markdown with one table per workload; `picture` is the name of a plot beside it."""
    return "\n".join(_lines(command, machine, results, scalings, picture, families)) + "\n"


def _lines(
    command: str,
    machine: Machine,
    results: Sequence[WorkloadResult],
    scalings: Sequence[Scaling],
    picture: str | None,
    families: Sequence[FamilyCosts],
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
    yield from _like_for_like(results)
    yield from _aims(results)
    if families:
        yield from _families(families)
    for result in results:
        yield from _workload(result)
    if scalings:
        yield from _scalings(scalings)
    if results:
        yield from _explained(results)


def _like_for_like(results: Sequence[WorkloadResult]) -> Iterator[str]:
    """Which statistics each computed, then what each added."""
    found = [(result, comparison) for result in results for comparison in comparisons(result)]
    if not found:
        return
    yield from ("", "## Like for like", "")
    yield "For each other tool, forewarn is set to the nearest equal set of statistics, on the same steps. What it"
    yield "computes beyond that cannot be left out. It also records its readings to disk and judges them."
    yield ""
    descriptions = {contender.name: contender.description for contender in all_contenders()}
    tools = dict.fromkeys(comparison.theirs.name for _, comparison in found)
    yield from _table(
        ("other tool", "computes", "forewarn as", "computes"),
        [(tool, descriptions[tool], MATCHES[tool], descriptions[MATCHES[tool]]) for tool in tools],
        num_words=4,
    )
    yield ""
    yield "Added CPU time, medians over rounds; the range of the ratio is that of the quartiles of both."
    yield ""
    rows = [
        (
            result.name,
            comparison.theirs.name,
            *(wording.cells(cost, result.noise)[1] for cost in (comparison.theirs, comparison.ours)),
            factor(comparison),
            f"{comparison.times.low:.1f} to {comparison.times.high:.1f}" if comparison.is_clear else "",
        )
        for result, comparison in found
    ]
    yield from _table(
        ("workload", "other tool", "it adds", "forewarn adds", "the other adds", "range"), rows, num_words=2
    )


def _families(families: Sequence[FamilyCosts]) -> Iterator[str]:
    yield from ("", "## What each family costs", "")
    yield "CPU time that a family adds to a measured step, in percent of the bare step: the monitor with everything"
    yield "beside one without that family, in one process. Medians over steps, and their quartiles in brackets."
    yield ""
    head = [f"{costs.workload} (bare step {wording.duration(costs.bare_seconds)})" for costs in families]
    yield from _table(
        ("family", *head),
        [(f"`{family}`", *(_of_family(costs, family) for costs in families)) for family in FAMILIES],
    )


def _of_family(costs: FamilyCosts, family: str) -> str:
    spread = costs.shares[family]
    clear = wording.share(spread.median) if spread.low > 0 else wording.BELOW_NOISE
    return f"{clear} ({wording.between(spread)})"


def _aims(results: Sequence[WorkloadResult]) -> Iterator[str]:
    decided = aims(results)
    if not decided:
        return
    yield from ("", "## What was aimed at", "")
    yield "Medians over rounds. Where an aim lies between their quartiles, or no further from the median than the bare"
    yield "loop from itself, or where a cost comes out below zero, it is in the noise: neither reached nor missed."
    yield ""
    rows = [(aim.workload, aim.what, aim.wanted, aim.measured, aim.verdict) for aim in decided]
    yield from _table(("workload", "what", "aim", "measured", "reached"), rows, num_words=2)


def _workload(result: WorkloadResult) -> Iterator[str]:
    yield from ("", f"## {result.name}", "", wording.heading(result), "")
    yield from _table(wording.COLUMNS, [wording.cells(cost, result.noise) for cost in result.costs])
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
            [(f"{count:,}", wording.duration(detailed), _brief(brief)) for count, detailed, brief in rows],
        )


def _brief(seconds: float) -> str:
    return wording.duration(seconds) if seconds > 0 else wording.BELOW_NOISE


def _explained(results: Sequence[WorkloadResult]) -> Iterator[str]:
    yield from ("", "## What the columns mean", "")
    yield from (f"- {column}: {meaning}" for column, meaning in LEGEND.items())
    yield from ("", "## What each contender does", "")
    described: dict[str, str] = {}
    for result in results:
        described |= {cost.name: cost.description for cost in result.costs}
        described |= {absent.name: absent.description for absent in result.absent}
    yield from (f"- `{name}`: {description}" for name, description in described.items())


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], num_words: int = 1) -> Iterator[str]:
    """A table whose first columns, `num_words` of them, are words, and the others numbers."""
    yield f"| {' | '.join(columns)} |"
    yield f"|{'---|' * num_words}{'---:|' * (len(columns) - num_words)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"


def _one_line(text: str) -> str:
    return " ".join(text.split())
