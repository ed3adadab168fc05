"""`forewarn bench`: what watching costs, on this machine."""

from __future__ import annotations

import contextlib
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
    from forewarn.lab.bench.machine import Machine
    from forewarn.lab.bench.measurements import Scaling, WorkloadResult
    from forewarn.lab.bench.workloads import Workload

LEAST_STEPS = 3
"""As `forewarn.lab.bench.contender.LEAST_CYCLE`, which is not imported for a help text."""
VERSIONS = ("forewarn", "torch", "numpy", "tensorboard", "torch-module-monitor", "wandb", "torchmortem", "trainscope",
            "pulsegrad")  # fmt: skip


@click.command()
@click.option(
    "--workload", "workload_names", default="gpt6", show_default=True, metavar="NAMES",
    help="gpt6, gpt12, tiny, all, none, or your own as module:function; several with commas.",
)  # fmt: skip
@click.option(
    "--contenders", "contender_names", default="all", show_default=True, metavar="NAMES",
    help="all, forewarn, or names with commas; the bare loop is always there.",
)  # fmt: skip
@click.option("--rounds", type=click.IntRange(min=1), default=4, show_default=True, help="Turns of each contender.")
@click.option(
    "--steps", type=click.IntRange(min=LEAST_STEPS), default=10, show_default=True, help="Timed steps in each half."
)
@click.option("--scaling", "wants_scaling", is_flag=True, help="Also measure how the cost grows with the model.")
@click.option("--large", is_flag=True, help="With --scaling: up to 200 million elements instead of 50.")
@click.option(
    "--out", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE.md",
    help="Write a page, and a plot beside it.",
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
    """Measure what watching costs on this machine, beside other tools.

    Every contender trains the same steps in turn, in one process with one torch thread. Beside each of its steps the
    bare loop makes one, and their CPU times are compared; halfway through a turn the two change models. Operations,
    host syncs and memory are counted in passes of their own. Tools that are not installed are listed with their pip
    line; pip install 'forewarn[bench]' brings them all. A workload takes about 15 minutes, and 4 with
    --contenders forewarn.

    \b
    Contenders:
      bare                    the loop alone; bare-again shows the error of the method
      forewarn-every-step     loss, lr, gradient norm and time on every step
      forewarn-default        and every tensor on one step in 100
      forewarn-full           every tensor on every step
      forewarn-activations    and what every layer gives
      torch-module-monitor, wandb, tensorboard-scalars, tensorboard-histograms,
      optimizer-metrics, torchmortem, trainscope, pulsegrad

    Your own workload is a function that returns (model, make_batch, loss): make_batch() gives the next batch,
    loss(model, batch) the loss. It is trained by AdamW, and the function is called anew for every turn.

    \b
    Examples:
      forewarn bench --contenders forewarn
      forewarn bench --workload all --scaling --out docs/overhead.md
      forewarn bench --workload mymodel:make --contenders forewarn,wandb --json
    """
    from forewarn.cli.terminal import Failure, print_json, show

    try:
        import torch
    except ModuleNotFoundError as error:
        raise Failure("forewarn bench trains a model and needs torch: pip install 'forewarn[torch]'") from error
    from forewarn.lab.bench.machine import this_machine

    try:
        workloads = _workloads(workload_names)
        contenders = _contenders(contender_names)
    except ValueError as error:
        raise Failure(str(error)) from error
    machine = this_machine(VERSIONS)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        results, scalings = _measured(workloads, contenders, rounds, steps, wants_scaling, large)
    finally:
        torch.set_num_threads(threads)
    called = shlex.join(["forewarn", *sys.argv[1:]])
    if wants_json:
        print_json(_as_json(called, machine, results, scalings))
    else:
        show(*_parts(machine, results, scalings))
    if out is not None:
        _write(out, called, machine, results, scalings)


def _workloads(names: str) -> list[Workload]:
    from forewarn.lab.bench.workloads import WORKLOADS, find_workload

    wanted = [name.strip() for name in names.split(",") if name.strip() not in ("", "none")]
    return [find_workload(name) for each in wanted for name in (WORKLOADS if each == "all" else [each])]


def _contenders(names: str) -> Callable[[], list[Contender]]:
    """A maker of contenders, since they keep a state per workload; a wrong name is an error at once."""
    from forewarn.lab.bench.lineup import chosen

    chosen(names)
    return lambda: chosen(names)


def _measured(
    workloads: Sequence[Workload],
    contenders: Callable[[], list[Contender]],
    rounds: int,
    steps: int,
    wants_scaling: bool,
    large: bool,
) -> tuple[list[WorkloadResult], list[Scaling]]:
    """Everything that was asked for, in a temporary directory."""
    from forewarn.cli.terminal import Failure
    from forewarn.lab.bench.rounds import benchmark, num_turns
    from forewarn.lab.bench.scaling import num_cases, scaling

    total = len(workloads) * num_turns(contenders(), rounds) + (num_cases(large) if wants_scaling else 0)
    results: list[WorkloadResult] = []
    with tempfile.TemporaryDirectory(prefix="forewarn-bench-") as folder, _progress(total) as tell:
        for workload in workloads:
            try:
                results.append(
                    benchmark(workload, contenders(), rounds=rounds, steps=steps, directory=Path(folder), tell=tell)
                )
            except ValueError as error:
                raise Failure(str(error)) from error
        scalings = list(scaling(Path(folder), tell, large=large)) if wants_scaling else []
    return results, scalings


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Callable[[str], None]]:
    """A bar on standard error that is drawn between turns only: one that redraws itself would be measured too."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from forewarn.views.console import plain_console

    console = plain_console(stderr=True)
    columns = (MofNCompleteColumn(), BarColumn(), TimeRemainingColumn(), TextColumn("{task.description}", markup=False))
    bar = Progress(*columns, console=console, auto_refresh=False, transient=True, disable=not console.is_terminal)
    with bar:
        task = bar.add_task("", total=total)
        done = -1

        def tell(words: str) -> None:
            nonlocal done
            done += 1
            bar.update(task, completed=done, description=words, refresh=True)

        yield tell


def _parts(
    machine: Machine, results: Sequence[WorkloadResult], scalings: Sequence[Scaling]
) -> Iterator[RenderableType]:
    """What is printed: a table per workload, a sentence per axis."""
    from rich.text import Text

    from forewarn.lab.bench.cells import heading, judging_sentence, machine_sentences, scaling_sentence
    from forewarn.views.wording import literal

    for sentence in machine_sentences(machine):
        yield Text(sentence)
    for result in results:
        yield Text(f"\n{result.name}", style="bold")
        yield Text(heading(result) + "\n")
        yield _table(result)
        if result.judging is not None:
            yield Text("\n" + judging_sentence(result.judging))
        for each in result.absent:
            yield Text(f"{each.name}: {literal(' '.join(each.reason.split()))}", style="dim")
    for scaling in scalings:
        yield Text("\n" + scaling_sentence(scaling))


def _table(result: WorkloadResult) -> RenderableType:
    from forewarn.cli.terminal import quiet_table
    from forewarn.lab.bench.cells import COLUMNS, cells

    table = quiet_table()
    table.add_column(COLUMNS[0], no_wrap=True)
    for name in COLUMNS[1:]:
        table.add_column(name, justify="right")
    for cost in result.costs:
        table.add_row(*cells(cost), style="bold" if cost.name.startswith("forewarn") else None)
    return table


def _as_json(
    called: str, machine: Machine, results: Sequence[WorkloadResult], scalings: Sequence[Scaling]
) -> dict[str, Any]:
    from dataclasses import asdict

    return {
        "command": called,
        "machine": asdict(machine) | {"is_shared": machine.is_shared},
        "workloads": [asdict(result) for result in results],
        "scaling": [asdict(scaling) for scaling in scalings],
    }


def _write(
    out: Path, called: str, machine: Machine, results: Sequence[WorkloadResult], scalings: Sequence[Scaling]
) -> None:
    """The page and the plot; without matplotlib one sentence says why there is none."""
    from forewarn.cli.terminal import Failure
    from forewarn.lab.bench.page import page
    from forewarn.lab.bench.plot import draw

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
