"""`forewarn faults`: how many faults the rules see, name and repair, on training scripts of many kinds."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import RenderableType

    from forewarn.lab.faults.cases import Case, Record
    from forewarn.lab.faults.scoring import Scores, Share
    from forewarn.lab.faults.selection import Selection

SETS = ("development", "validation", "test")
"""Same as `forewarn.lab.faults.sets.Set`, whose import would slow down the help text."""
PACKAGES = ("forewarn", "torch", "numpy")
"""Packages whose versions the page names."""
MOST_SHOWN = 12
"""Misses of each sort that are printed; the page and the JSON have all."""


@click.command()
@click.option("--set", "sets", type=click.Choice(SETS), multiple=True,
              help="Set of workloads; may be repeated.  [default: development, validation]")  # fmt: skip
@click.option("--workload", "workloads", multiple=True, metavar="NAME", help="Only this workload; may be repeated.")
@click.option("--fault", "faults", multiple=True, metavar="NAME", help="Only this fault; may be repeated.")
@click.option("--seeds", type=click.IntRange(min=1), help="Seeds per fault.")
@click.option("--quick", is_flag=True, help="15 cases, in under a minute on two cores.")
@click.option("--full", is_flag=True, help="Every fault on every workload with two seeds. Takes hours.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), metavar="FOLDER",
              help="Keep the records here. An interrupted run with the same folder continues.")  # fmt: skip
@click.option("--keep-runs", is_flag=True, help="Also keep each monitored run in --out, for `forewarn check`.")
@click.option("--judge-again", is_flag=True,
              help="Judge the kept runs with the present rules. Only remedies that are new are trained.")  # fmt: skip
@click.option("--stored", is_flag=True, help="Run nothing: report what is in --out.")
@click.option(
    "--no-remedies", is_flag=True, help="Do not run faults again with remedies, which takes most of the time."
)
@click.option("--page", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="Write a Markdown page.")
@click.option("--jobs", type=click.IntRange(min=1), default=2, show_default=True, help="Number of processes.")
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
    stored: bool,
    no_remedies: bool,
    page: Path | None,
    jobs: int,
    wants_json: bool,
) -> None:
    """Put faults into small training scripts and see which are detected, named and repaired.

    A case is a script (such as gpt), a change and a seed. The change is a fault (such as lr-too-high), one that looks
    odd but is healthy (such as warm-restarts), or none. Each run is watched and judged like yours. If it has a fault,
    it runs again with the first remedy, with a random one, and with a lower learning rate.

    Without --quick or --full, every fault runs on one script of each set: under 15 minutes on two cores.

    \b
    Sets, which share no kind of model:
      development   rules are tuned here
      validation    to look at once per change of the rules
      test          for published figures only; every use is counted

    \b
    Examples:
      forewarn faults --quick
      forewarn faults --fault lr-too-high --workload gpt --workload mlp
      forewarn faults --out results --keep-runs
      forewarn faults --out results --judge-again    # after a change of the rules
      forewarn faults --out results --full --stored --page report.md
    """
    from forewarn.cli.terminal import Failure, print_json, show

    try:
        import torch  # noqa: F401
    except ModuleNotFoundError as error:
        raise Failure("forewarn faults trains models and needs torch: pip install 'forewarn[torch]'") from error
    if judge_again and out is None:
        raise Failure("--judge-again needs the --out folder of an earlier run with --keep-runs")
    if stored and out is None:
        raise Failure("--stored needs the --out folder of an earlier run")
    from forewarn.lab.faults.scoring import scores

    chosen, selection = sets or SETS[: 1 if quick else 2], _selection(workloads, faults, seeds, quick, full)
    if stored and out is not None:
        records = _stored(out, chosen, selection)
    else:
        with _folder(out) as folder:
            records = _run(_cases(chosen, selection), folder, jobs, keep_runs, judge_again, not no_remedies)
    _tell_if_stale(records)
    result = scores(records)
    if page is not None:
        from forewarn.lab.bench.cells import machine_sentences
        from forewarn.lab.bench.measurements import this_machine
        from forewarn.lab.faults.page import page as written

        machine = this_machine(PACKAGES)
        if stored:  # the load of now is not that of the runs
            machine = dataclasses.replace(machine, load=None)
        page.write_text(written(records, machine_sentences(machine)))
    if wants_json:
        print_json(as_json(result))
    else:
        show(*report(result))


def _selection(
    workloads: Sequence[str], faults: Sequence[str], seeds: int | None, quick: bool, full: bool
) -> Selection:
    """What to run. Raises Failure for an unknown name."""
    from dataclasses import replace

    from forewarn.cli.terminal import Failure
    from forewarn.lab.faults.injected import FAULTS
    from forewarn.lab.faults.selection import FULL, QUICK, SAMPLE
    from forewarn.lab.faults.sets import WORKLOADS
    from forewarn.suggestions import did_you_mean

    scripts = [workload.name for ones in WORKLOADS.values() for workload in ones]
    for kind, names, options in (("workload", workloads, scripts), ("fault", faults, list(FAULTS))):
        for name in set(names) - set(options):
            hint = did_you_mean(name, options) or f"choose from {', '.join(options)}"
            raise Failure(f"there is no {kind} {name!r}; {hint}")
    selection = QUICK if quick else FULL if full else SAMPLE
    if workloads or faults:
        selection = replace(
            selection, workloads=workloads or selection.workloads, faults=faults or selection.faults,
            workloads_per_fault=None,
        )  # fmt: skip
    return selection if seeds is None else replace(selection, fault_seeds=seeds)


def _cases(sets: Sequence[str], selection: Selection) -> list[Case]:
    from forewarn.cli.terminal import Failure
    from forewarn.lab.faults.fingerprint import count_test_run
    from forewarn.lab.faults.sets import Set

    cases = [case for which in Set if which in sets for case in selection.cases(which)]
    if not cases:
        raise Failure(f"the {' and '.join(sets)} set has none of these workloads; choose another with --set")
    if Set.TEST in sets:
        count_test_run()
    return cases


def _stored(folder: Path, sets: Sequence[str], selection: Selection) -> list[Record]:
    """The records in a folder of cases that are selected."""
    from forewarn.cli.terminal import Failure
    from forewarn.lab.faults.running import stored_records
    from forewarn.lab.faults.sets import Set

    kept = stored_records(folder)
    cases = [case for which in Set if which in sets for case in selection.cases(which)]
    records = [kept[case.key] for case in cases if case.key in kept]
    if not records:
        raise Failure(f"{folder} has no records of the {' and '.join(sets)} set")
    return records


@contextlib.contextmanager
def _folder(out: Path | None) -> Iterator[Path]:
    if out is not None:
        yield out
    else:
        with tempfile.TemporaryDirectory(prefix="forewarn-faults-") as folder:
            yield Path(folder)


def _run(
    cases: Sequence[Case], folder: Path, jobs: int, keep_runs: bool, judge_again: bool, remedies: bool
) -> list[Record]:
    """The records of the cases, with a progress bar on a terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from forewarn.lab.faults.running import run_cases, stored_records
    from forewarn.views.console import plain_console

    console = plain_console(stderr=True)
    columns = (MofNCompleteColumn(), BarColumn(), TimeRemainingColumn(), TextColumn("{task.description}", markup=False))
    done = stored_records(folder)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        num_done = 0 if judge_again else sum(case.key in done for case in cases)
        task = bar.add_task("", total=len(cases), completed=num_done)
        for record in run_cases(cases, folder, jobs, keep_runs, judge_again, remedies):
            bar.update(task, advance=1, description=record.case.key)
    stored = stored_records(folder)
    return [stored[case.key] for case in cases if case.key in stored]


def _tell_if_stale(records: Sequence[Record]) -> None:
    """Say how many records come from other rules than the present ones."""
    from forewarn.lab.faults.fingerprint import rules_hash

    now = rules_hash()
    stale = sum(record.rules != now for record in records)
    if stale:
        click.echo(f"{stale} of {len(records)} runs were judged by earlier rules; use --judge-again", err=True)


def _shares(result: Scores) -> dict[str, Share]:
    """The scores that are shares, each with its name."""
    from forewarn.lab.faults.cases import CHANCE, FIRST, LOWERED
    from forewarn.lab.faults.page import is_supervised

    return {
        "healthy runs with a warning": result.healthy.where(is_supervised).warned,
        "  the same, RL and GANs": result.healthy.where(lambda record: not is_supervised(record)).warned,
        "harmful faults detected": result.detected,
        "right cause first": result.named,
        "repaired, or the fix named": result.fixed,
        "  repaired, where code can": result.repaired(FIRST),
        "  by a random remedy": result.repaired(CHANCE),
        "  by a lower learning rate": result.repaired(LOWERED),
        "twins unharmed by the remedy": result.no_harm,
    }


def report(result: Scores) -> Iterator[RenderableType]:
    """The printed report: the scores, then what went wrong."""
    from rich.text import Text

    from forewarn.cli.terminal import quiet_table
    from forewarn.types import figure

    table = quiet_table()
    table.add_column(no_wrap=True)
    for heading in ("", "share", "95% interval"):
        table.add_column(heading, justify="right")
    for name, share in _shares(result).items():
        low, high = share.interval
        cells = (f"{share.value:.0%}", f"{low:.0%} to {high:.0%}") if share.total else ("", "")
        table.add_row(name, f"{share.hits} of {share.total}", *cells)
    yield table
    yield Text(
        f"\nWarnings per 1,000 healthy steps: {figure(result.healthy.per_thousand_steps)}. "
        f"Median warning before the damage: {figure(result.median_lead)} steps ({len(result.leads)} runs). "
        f"Faults that did no harm: {len(result.harmless)}."
    )
    for heading, lines in _misses(result).items():
        if lines:
            yield Text(f"\n{heading} ({len(lines)})", style="bold")
            for line in lines[:MOST_SHOWN]:
                yield Text(f"  {line}", no_wrap=True, overflow="ellipsis")
            if len(lines) > MOST_SHOWN:
                yield Text(f"  and {len(lines) - MOST_SHOWN} more", style="dim")


def _misses(result: Scores) -> dict[str, list[str]]:
    """What went wrong, one line per case."""
    return {
        "Healthy, but warned about": [
            f"{record.case.key}: {record.warned[0].name} at step {record.warned[0].fired}"
            for record in result.healthy.records
            if record.num_warnings
        ],
        "Harmful, but not detected": [verdict.record.case.key for verdict in result.harmful if not verdict.is_detected],
        "Detected, but another alert first": [
            f"{verdict.record.case.key}: {verdict.first.name}"
            for verdict in result.harmful
            if verdict.is_detected and not verdict.is_named and verdict.first is not None
        ],
    }


def as_json(result: Scores) -> dict[str, Any]:
    """The scores and all cases."""
    from forewarn.lab.faults.fingerprint import rules_hash, test_runs

    verdicts = (*result.harmful, *result.harmless)
    return {
        "rules": rules_hash(),
        "test_set_runs": test_runs(),
        "scores": {
            name.strip(): {"hits": share.hits, "total": share.total, "interval": share.interval}
            for name, share in _shares(result).items()
        },
        "warnings_per_1000_healthy_steps": result.healthy.per_thousand_steps,
        "median_lead_steps": result.median_lead,
        "healthy": [
            {"case": record.case.key, "warnings": [alert.code for alert in record.warned][: record.num_warnings]}
            for record in result.healthy.records
        ],
        "faults": [
            {
                "case": verdict.record.case.key, "harmful": verdict.is_harmful, "detected_at": verdict.detected_at,
                "first": verdict.first.code if verdict.first else None, "named": verdict.is_named,
                "damage_at": verdict.damage, "repaired": verdict.repaired, "names_fix": verdict.names_fix,
            }
            for verdict in verdicts
        ],
    }  # fmt: skip
