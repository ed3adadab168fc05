"""The command: `python -m benchmarks.overhead`, in the repository's root."""

from __future__ import annotations

import math
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import click
from rich.text import Text

from benchmarks.overhead.families import FAMILIES, FamilyCosts, families
from benchmarks.overhead.lineup import find_contenders
from benchmarks.overhead.page import page
from benchmarks.overhead.plot import draw
from benchmarks.overhead.scaling import Scaling, num_cases, scaling, scaling_sentence
from forewarn.cli import bench
from forewarn.cli.terminal import Failure, print_json, show
from forewarn.lab.bench.contender import LEAST_CYCLE
from forewarn.lab.bench.measurements import Machine, WorkloadResult, this_machine
from forewarn.lab.bench.rounds import num_turns
from forewarn.lab.bench.workloads import find_workloads

PACKAGES = (
    *bench.PACKAGES, "tensorboard", "torch-module-monitor", "wandb", "torchmortem", "trainscope", "pulsegrad",
)  # fmt: skip


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--workload", "workload_names", default="gpt6", show_default=True, metavar="NAMES",
    help="gpt6, gpt12, tiny, modules, resnet, encoder, mlp, all, none, or your own as module:function; several are "
    "separated by commas.",
)  # fmt: skip
@click.option(
    "--contenders", "contender_names", default="all", show_default=True, metavar="NAMES",
    help="all, forewarn, core, or names separated by commas; the bare loop is always included.",
)  # fmt: skip
@click.option(
    "--all-on", "all_on", metavar="NAMES",
    help="Workloads on which all of them run; on the others, only those of the group core.",
)  # fmt: skip
@click.option(
    "--families", "family_workloads", default="none", show_default=True, metavar="NAMES",
    help="Workloads on which to measure what each family of measurements costs.",
)  # fmt: skip
@click.option(
    "--rounds", type=click.IntRange(min=1), default=4, show_default=True, help="Number of turns per contender."
)
@click.option(
    "--steps", type=click.IntRange(min=LEAST_CYCLE), default=10, show_default=True,
    help="Timed steps with each of the two models of a turn.",
)  # fmt: skip
@click.option(
    "--minutes", type=click.FloatRange(min=0, min_open=True), default=math.inf,
    help="Take fewer rounds, but at least two, so that all workloads together take about this long.",
)  # fmt: skip
@click.option("--scaling", "wants_scaling", is_flag=True, help="Also measure how the cost grows with the model.")
@click.option("--large", is_flag=True, help="With --scaling: up to 200 million elements instead of 50.")
@click.option(
    "--out", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE.md",
    help="Write a Markdown page, and a plot beside it.",
)  # fmt: skip
@click.option("--json", "wants_json", is_flag=True, help="Print one JSON object and nothing else.")
def command(
    workload_names: str,
    contender_names: str,
    all_on: str | None,
    family_workloads: str,
    rounds: int,
    steps: int,
    minutes: float,
    wants_scaling: bool,
    large: bool,
    out: Path | None,
    wants_json: bool,
) -> None:
    """Measure what forewarn and other tools add to a training step on this machine.

    It measures as `forewarn bench` does, see there for the columns, the tiers of forewarn and your own workload. Tools
    that are not installed are listed with their pip command; pip install -e '.[bench]' installs them all. A workload
    takes about 15 minutes.

    \b
    Contenders:
      bare, bare-again, forewarn-every-step, forewarn-default, forewarn-full,
      forewarn-activations, forewarn-tensors, forewarn-outputs,
      forewarn-histograms, forewarn-gradient-histograms, forewarn-updates,
      forewarn-outputs-10, torch-module-monitor-tensors,
      torch-module-monitor-outputs, wandb, tensorboard-scalars,
      tensorboard-histograms, optimizer-metrics, torchmortem, trainscope,
      pulsegrad

    \b
    Examples:
      python -m benchmarks.overhead --workload all --scaling --out docs/overhead.md
      python -m benchmarks.overhead --workload mymodel:make --contenders forewarn,wandb --json
    """
    with bench.user_errors():
        workloads = [] if workload_names == "none" else find_workloads(workload_names)
        of_families = [] if family_workloads == "none" else find_workloads(family_workloads)
        everywhere = workload_names if all_on is None else all_on
        chosen = {name.strip() for name in everywhere.split(",")}
        names = {
            workload.name: contender_names if {workload.name, "all"} & chosen else "core" for workload in workloads
        }
        total = sum(num_turns(find_contenders(group), rounds) for group in names.values())
    total += (num_cases(large) if wants_scaling else 0) + len(FAMILIES) * len(of_families)
    called = shlex.join(["python", "-m", "benchmarks.overhead", *sys.argv[1:]])
    machine = this_machine(PACKAGES)
    results: list[WorkloadResult] = []
    scalings: Sequence[Scaling] = ()
    with bench.measuring(total) as (directory, tell):
        begin = time.monotonic()
        costs = families(of_families, 2 * steps, directory, tell)
        turns = [num_turns(find_contenders(names[workload.name]), rounds) for workload in workloads]
        for number, workload in enumerate(workloads):
            left = 60 * minutes - (time.monotonic() - begin)
            seconds = left * turns[number] / sum(turns[number:])
            group = partial(find_contenders, names[workload.name])
            results += bench.measure([workload], group, rounds, steps, directory, tell, seconds)
            passed = (time.monotonic() - begin) / 60
            click.echo(f"{workload.name}: {results[-1].rounds} rounds, {passed:.1f} minutes so far", err=True)
            if out is not None:  # so that what was measured is kept if the rest is interrupted
                _write(out, called, machine, results, scalings, costs)
        if wants_scaling:
            scalings = scaling(directory, tell, large=large)
    if wants_json:
        axes = [asdict(axis) for axis in scalings]
        of_each = [asdict(one) for one in costs]
        print_json(bench.as_json(called, machine, results) | {"scaling": axes, "families": of_each})
    else:
        show(*bench.report(machine, results), *(Text("\n" + scaling_sentence(axis)) for axis in scalings))
    if out is not None:
        _write(out, called, machine, results, scalings, costs)
        click.echo(f"Written: {out}", err=True)


def _write(
    out: Path,
    called: str,
    machine: Machine,
    results: Sequence[WorkloadResult],
    scalings: Sequence[Scaling],
    costs: Sequence[FamilyCosts],
) -> None:
    """Write the page and its plot; without matplotlib there is no plot, and a message says so."""
    picture: Path | None = out.with_suffix(".png")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        try:
            draw(out.with_suffix(".png"), results, scalings)
        except ModuleNotFoundError:
            picture = None
            click.echo("No plot was drawn, for want of matplotlib: pip install matplotlib", err=True)
        name = picture.name if picture else None
        out.write_text(page(called, machine, results, scalings, name, costs), encoding="utf-8")
    except OSError as error:
        raise Failure(f"{out} cannot be written: {error.strerror}") from error


if __name__ == "__main__":
    command(prog_name="python -m benchmarks.overhead")
