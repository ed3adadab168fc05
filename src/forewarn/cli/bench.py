"""`forewarn bench`: what monitoring costs with your model, on your machine."""

from __future__ import annotations

import contextlib
import math
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import RenderableType

    from forewarn.lab.bench.contender import Contender
    from forewarn.lab.bench.measurements import Machine, WorkloadResult
    from forewarn.lab.bench.rounds import Tell
    from forewarn.lab.bench.workloads import Workload

LEAST_STEPS = 3
"""Same as `forewarn.lab.bench.contender.LEAST_CYCLE`, whose import would slow down the help text."""
PACKAGES = ("forewarn", "torch", "numpy")
"""Packages whose versions are reported."""
HEADINGS = ("added", "quartiles", "CPU time", "", "ops", "syncs", "memory")
"""Headings of the cells after the name. Cells without a heading are omitted, so that a row fits in 80 columns."""


@click.command()
@click.option(
    "--workload", "workload_names", default="gpt6", show_default=True, metavar="NAMES",
    help="Workloads to measure: gpt6, gpt12, tiny, modules, resnet, encoder, mlp, all, or your own as module:function. "
    "Separate several with commas.",
)  # fmt: skip
@click.option("--rounds", type=click.IntRange(min=1), default=4, show_default=True, help="Number of turns per tier.")
@click.option(
    "--steps", type=click.IntRange(min=LEAST_STEPS), default=10, show_default=True,
    help="Timed steps per model and turn.",
)  # fmt: skip
@click.option("--json", "wants_json", is_flag=True, help="Print one JSON object and nothing else.")
def command(workload_names: str, rounds: int, steps: int, wants_json: bool) -> None:
    """Measure what monitoring adds to a training step, with your model on this machine.

    Each tier of forewarn trains next to the bare loop on one CPU thread. The two alternate step by step and swap models
    halfway, so both see the same machine. Operations and memory are counted in separate passes. A workload takes about
    4 minutes.

    \b
    Tiers:
      bare                    the training loop alone
      bare-again              the same again: shows the measurement error
      forewarn-every-step     loss, learning rate, gradient norm and step time
      forewarn-default        also every tensor and layer, every 100 steps
      forewarn-full           every tensor on every step
      forewarn-activations    also every layer's output on every step

    \b
    Columns:
      added                   added CPU time, relative to the bare step (median)
      quartiles               range of the middle half of all rounds
      CPU time                added CPU time per step (median)
      ops                     added torch operations per step
      syncs                   added operations that would wait for a GPU
      memory                  added memory at the end of a turn

    To measure your own model, write a function that returns (model, make_batch, loss). make_batch() returns the next
    batch, and loss(model, batch) returns its loss. The function is called again for every turn. The model is trained
    with AdamW.

    \b
    Examples:
      forewarn bench
      forewarn bench --workload mlp --rounds 1 --steps 3    # a quick look
      forewarn bench --workload mymodel:make --json
    """
    from forewarn.cli.terminal import Failure, print_json, show

    try:
        import torch  # noqa: F401
    except ModuleNotFoundError as error:
        raise Failure("forewarn bench trains a model and needs torch: pip install 'forewarn[torch]'") from error
    from forewarn.lab.bench.measurements import this_machine
    from forewarn.lab.bench.rounds import num_turns
    from forewarn.lab.bench.tiers import own_contenders
    from forewarn.lab.bench.workloads import find_workloads

    with user_errors():
        workloads = find_workloads(workload_names)
    machine = this_machine(PACKAGES)
    with measuring(len(workloads) * num_turns(own_contenders(), rounds)) as (directory, tell):
        results = measure(workloads, own_contenders, rounds, steps, directory, tell)
    if wants_json:
        print_json(as_json(shlex.join(["forewarn", *sys.argv[1:]]), machine, results))
    else:
        show(*report(machine, results))


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """Turn a ValueError about a name or a workload into a Failure."""
    from forewarn.cli.terminal import Failure

    try:
        yield
    except ValueError as error:
        raise Failure(str(error)) from error


@contextlib.contextmanager
def measuring(total: int) -> Iterator[tuple[Path, Tell]]:
    """Use one torch thread, a temporary directory, and a progress bar for `total` turns."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory(prefix="forewarn-bench-") as directory, _progress(total) as tell:
            yield Path(directory), tell
    finally:
        torch.set_num_threads(threads)


def measure(
    workloads: Sequence[Workload],
    contenders: Callable[[], list[Contender]],
    rounds: int,
    steps: int,
    directory: Path,
    tell: Tell,
    seconds: float = math.inf,
) -> list[WorkloadResult]:
    """Measure every workload, each in about this many seconds. Contenders keep state, so each gets new ones."""
    from forewarn.lab.bench.rounds import benchmark

    with user_errors():
        return [
            benchmark(
                workload, contenders(), rounds=rounds, steps=steps, directory=directory, tell=tell, seconds=seconds
            )
            for workload in workloads
        ]


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Tell]:
    """A progress bar on standard error, redrawn only between turns so that drawing it is never measured."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from forewarn.views.console import plain_console

    console = plain_console(stderr=True)
    columns = (MofNCompleteColumn(), BarColumn(), TimeRemainingColumn(), TextColumn("{task.description}", markup=False))
    bar = Progress(*columns, console=console, auto_refresh=False, transient=True, disable=not console.is_terminal)
    with bar:
        task = bar.add_task("", total=total)
        num_done = -1

        def tell(description: str) -> None:
            nonlocal num_done
            num_done += 1
            bar.update(task, completed=num_done, description=description, refresh=True)

        yield tell


def report(machine: Machine, results: Sequence[WorkloadResult]) -> Iterator[RenderableType]:
    """The printed report: the machine, and a table per workload."""
    from rich.text import Text

    from forewarn.lab.bench.cells import heading, judging_sentence, machine_sentences
    from forewarn.views.wording import literal

    for sentence in machine_sentences(machine):
        yield Text(sentence)
    for result in results:
        yield Text(f"\n{result.name}", style="bold")
        yield Text(heading(result) + "\n")
        yield _table(result)
        if result.judging is not None:
            yield Text("\n" + judging_sentence(result.judging))
        for absent in result.absent:
            yield Text(f"{absent.name}: {literal(' '.join(absent.reason.split()))}", style="dim")


def _table(result: WorkloadResult) -> RenderableType:
    from forewarn.cli.terminal import quiet_table
    from forewarn.lab.bench.cells import cells

    table = quiet_table()
    table.add_column(no_wrap=True)
    for heading in filter(None, HEADINGS):
        table.add_column(heading, justify="right")
    for cost in result.costs:
        name, *row = cells(cost, result.noise)
        shown_cells = [cell for heading, cell in zip(HEADINGS, row, strict=True) if heading]
        table.add_row(name, *shown_cells, style="bold" if name.startswith("forewarn") else None)
    return table


def as_json(called: str, machine: Machine, results: Sequence[WorkloadResult]) -> dict[str, Any]:
    """Everything that was measured, and the command that did it."""
    from dataclasses import asdict

    return {
        "command": called,
        "machine": asdict(machine) | {"is_shared": machine.is_shared},
        "workloads": [asdict(result) for result in results],
    }
