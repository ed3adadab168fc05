"""`forewarn faults`: the benchmark of faults, on training scripts of many kinds."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import RenderableType

    from forewarn.lab.faults.cases import Case, Record
    from forewarn.lab.faults.scoring import Scores

SETS = ("development", "validation", "test")
"""Same as `forewarn.lab.faults.sets.Set`, whose import would slow down the help text."""


@click.command()
@click.option("--set", "sets", type=click.Choice(SETS), multiple=True,
              help="Which set of workloads. Default: development.")  # fmt: skip
@click.option("--workload", "workloads", multiple=True, metavar="NAME", help="Only this workload; may be repeated.")
@click.option("--fault", "faults", multiple=True, metavar="NAME", help="Only this fault; may be repeated.")
@click.option("--seeds", type=click.IntRange(min=1), help="Seeds per fault.")
@click.option("--quick", is_flag=True, help="A handful of cases, in under a minute on two cores.")
@click.option("--full", is_flag=True, help="Every fault on every workload, two seeds; takes hours.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False),
              help="Keep the records here. Cases that have one are not run again.")  # fmt: skip
@click.option("--keep-runs", is_flag=True, help="Also keep every monitored run below --out, for `forewarn check`.")
@click.option("--judge-again", is_flag=True, help="Judge the kept runs again with the present rules; trains nothing.")
@click.option("--jobs", type=click.IntRange(min=1), default=2, show_default=True, help="Processes.")
@click.option("--json", "wants_json", is_flag=True, help="Print one JSON object and nothing else.")
def command(
    sets: tuple[str, ...],
    workloads: tuple[str, ...],
    faults: tuple[str, ...],
    seeds: int | None,
    quick: bool,
    full: bool,
    out: Path | None,
    keep_runs: bool,
    judge_again: bool,
    jobs: int,
    wants_json: bool,
) -> None:
    """Put faults into small training scripts and see which are detected, named and repaired.

    \b
    Examples:
      forewarn faults --quick
      forewarn faults --fault lr-too-high --workload gpt
      forewarn faults --set validation --out results
      forewarn faults --out results --keep-runs        # then, after a change of rules:
      forewarn faults --out results --judge-again
    """
    from forewarn.cli.terminal import Failure, print_json, show

    try:
        import torch  # noqa: F401
    except ModuleNotFoundError as error:
        raise Failure("forewarn faults trains models and needs torch: pip install 'forewarn[torch]'") from error
    from dataclasses import replace

    from forewarn.lab.faults.scoring import scores
    from forewarn.lab.faults.selection import FULL, QUICK, SAMPLE
    from forewarn.lab.faults.sets import Set

    selection = QUICK if quick else FULL if full else SAMPLE
    if workloads or faults:
        selection = replace(selection, workloads=workloads, faults=faults, workloads_per_fault=None)
    if seeds is not None:
        selection = replace(selection, fault_seeds=seeds)
    chosen = [Set(name) for name in sets or SETS[:1]]
    cases = [case for which in chosen for case in selection.cases(which)]
    if not cases:
        raise Failure("no workload of this set has these names")
    with _folder(out) as folder:
        records = _judged_again(cases, folder) if judge_again else _run(cases, folder, jobs, keep_runs)
    result = scores(records)
    if wants_json:
        print_json(as_json(result))
    else:
        show(*report(result))


@contextlib.contextmanager
def _folder(out: Path | None) -> Iterator[Path]:
    if out is not None:
        yield out
    else:
        with tempfile.TemporaryDirectory(prefix="forewarn-faults-") as folder:
            yield Path(folder)


def _run(cases: Sequence[Case], folder: Path, jobs: int, keep_runs: bool) -> list[Record]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from forewarn.lab.faults.running import run_cases, stored_records
    from forewarn.views.console import plain_console

    console = plain_console(stderr=True)
    columns = (MofNCompleteColumn(), BarColumn(), TimeRemainingColumn(), TextColumn("{task.description}", markup=False))
    num_done = sum(case.key in stored_records(folder) for case in cases)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=len(cases), completed=num_done)
        for record in run_cases(cases, folder, jobs, keep_runs):
            bar.update(task, advance=1, description=record.case.key)
    stored = stored_records(folder)
    return [stored[case.key] for case in cases if case.key in stored]


def _judged_again(cases: Iterable[Case], folder: Path) -> list[Record]:
    from forewarn.lab.faults.running import judged_again, stored_records

    stored = stored_records(folder)
    return [judged_again(stored[case.key], folder) for case in cases if case.key in stored]


def report(result: Scores) -> Iterator[RenderableType]:
    """The printed report."""
    from rich.text import Text

    from forewarn.cli.terminal import quiet_table
    from forewarn.lab.faults.scoring import REMEDIERS, Share

    def row(name: str, share: Share) -> tuple[str, str, str, str]:
        low, high = share.interval
        return name, f"{share.hits} of {share.total}", f"{share.value:.0%}", f"{low:.0%} to {high:.0%}"

    table = quiet_table()
    table.add_column(no_wrap=True)
    for heading in ("", "share", "95% interval"):
        table.add_column(heading, justify="right")
    table.add_row(*row("healthy runs with a warning", result.healthy.warned))
    table.add_row(*row("harmful faults detected", result.detected))
    table.add_row(*row("right cause first", result.named))
    for who in REMEDIERS:
        table.add_row(*row(f"repaired by: {who}", result.repaired(who)))
    table.add_row(*row("repaired, or the fix named", result.fixed))
    table.add_row(*row("healthy twins not harmed by it", result.no_harm))
    yield table
    yield Text(f"\nfalse warnings per 1,000 healthy steps: {result.healthy.per_thousand_steps:.2f}")
    yield Text(f"median steps of warning before the damage: {result.median_lead:g}")
    yield Text(f"faults that did no harm here: {len(result.harmless)}")
    yield Text("")
    for record in result.healthy.records:
        if record.num_warnings:
            first = record.warned[0]
            yield Text(f"false  {record.case.key}: {first.code} {first.name} at step {first.fired}")
    for verdict in result.harmful:
        if not verdict.is_detected:
            yield Text(f"missed {verdict.record.case.key}")
        elif not verdict.is_named and verdict.first is not None:
            yield Text(f"named  {verdict.record.case.key}: {verdict.first.code} {verdict.first.name}")


def as_json(result: Scores) -> dict[str, Any]:
    return {"detected": result.detected.value, "named": result.named.value}
