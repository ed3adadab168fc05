"""The command: `python -m benchmarks.overhead`, in the repository's root."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import click
from rich.text import Text

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
    help="gpt6, gpt12, tiny, all, none, or your own as module:function; separate several by commas.",
)  # fmt: skip
@click.option(
    "--contenders", "contender_names", default="all", show_default=True, metavar="NAMES",
    help="all, forewarn, or names separated by commas; the bare loop is always included.",
)  # fmt: skip
@click.option(
    "--rounds", type=click.IntRange(min=1), default=4, show_default=True, help="Number of turns per contender."
)
@click.option(
    "--steps", type=click.IntRange(min=LEAST_CYCLE), default=10, show_default=True,
    help="Timed steps with each of the two models of a turn.",
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
    rounds: int,
    steps: int,
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
      forewarn-activations, torch-module-monitor, wandb, tensorboard-scalars,
      tensorboard-histograms, optimizer-metrics, torchmortem, trainscope,
      pulsegrad

    \b
    Examples:
      python -m benchmarks.overhead --workload all --scaling --out docs/overhead.md
      python -m benchmarks.overhead --workload mymodel:make --contenders forewarn,wandb --json
    """
    with bench.user_errors():
        workloads = [] if workload_names == "none" else find_workloads(workload_names)
        contenders = find_contenders(contender_names)
    machine = this_machine(PACKAGES)
    total = len(workloads) * num_turns(contenders, rounds) + (num_cases(large) if wants_scaling else 0)
    with bench.measuring(total) as (directory, tell):
        results = bench.measure(workloads, lambda: find_contenders(contender_names), rounds, steps, directory, tell)
        scalings = scaling(directory, tell, large=large) if wants_scaling else ()
    called = shlex.join(["python", "-m", "benchmarks.overhead", *sys.argv[1:]])
    if wants_json:
        axes = [asdict(axis) for axis in scalings]
        print_json(bench.as_json(called, machine, results) | {"scaling": axes})
    else:
        show(*bench.report(machine, results), *(Text("\n" + scaling_sentence(axis)) for axis in scalings))
    if out is not None:
        _write(out, called, machine, results, scalings)


def _write(
    out: Path, called: str, machine: Machine, results: Sequence[WorkloadResult], scalings: Sequence[Scaling]
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
        out.write_text(page(called, machine, results, scalings, picture.name if picture else None), encoding="utf-8")
    except OSError as error:
        raise Failure(f"{out} cannot be written: {error.strerror}") from error
    click.echo(f"Written: {out}{f' and {picture}' if picture else ''}", err=True)


if __name__ == "__main__":
    command(prog_name="python -m benchmarks.overhead")
