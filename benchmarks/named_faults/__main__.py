"""The command: `python -m benchmarks.named_faults`, in the repository's root."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType

import click
import torch

from benchmarks.named_faults.faults import FAULTS, Loop
from benchmarks.named_faults.page import SNIPPET, Cell, Comparison, from_json, page, table
from benchmarks.named_faults.scoring import Remark, Said
from benchmarks.named_faults.tools import TOOLS
from forewarn.lab.bench.measurements import this_machine

PACKAGES = ("forewarn", "torch", *(tool.package for tool in TOOLS.values() if tool.package != "forewarn"))
SECONDS = 300
"""Time limit of a run, far more than any takes on a busy machine."""


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--tools", default=",".join(TOOLS), show_default=True, help="Names, separated by commas.")
@click.option("--faults", default=",".join(FAULTS), show_default=True, help="Names, separated by commas.")
@click.option("--seeds", type=click.IntRange(min=1), default=3, show_default=True, help="Number of runs of each fault.")
@click.option("--jobs", type=click.IntRange(min=1), default=2, show_default=True, help="Number of runs at a time.")
@click.option(
    "--again", type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Take from this JSON file the runs that it has, and run only the others.",
)  # fmt: skip
@click.option(
    "--out", type=click.Path(dir_okay=False, path_type=Path),
    help="Write the page here, and all that the tools said beside it as JSON.",
)  # fmt: skip
def command(tools: str, faults: str, seeds: int, jobs: int, again: Path | None, out: Path | None) -> None:
    """Break training runs in everyday ways and see what each tool says about them.

    pip install -e '.[bench]' installs the tools. All faults under all tools take about 20 minutes. A change of a
    pattern needs no new runs: --again docs/compared.json scores the stored words.

    \b
    Examples:
      python -m benchmarks.named_faults --out docs/compared.md
      python -m benchmarks.named_faults --tools forewarn --faults zero-grad,detached --seeds 1
    """
    torch.set_num_threads(1)
    known = from_json(json.loads(again.read_text(encoding="utf-8"))) if again else {}
    result = compare(_chosen(tools, TOOLS), _chosen(faults, FAULTS), seeds, jobs, known)
    click.echo("\n".join(table(result)))
    if out is not None:
        run_alone(lambda folder: exec(compile(SNIPPET, "snippet", "exec"), {}))
        called = f"python -m benchmarks.named_faults --seeds {seeds} --out {out}"
        machine = this_machine(PACKAGES)
        beside = out.with_suffix(".json")
        out.write_text(page(called, machine, result, beside.name), encoding="utf-8")
        everything = {"command": called, "machine": asdict(machine), **result.as_json()}
        beside.write_text(json.dumps(everything, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        click.echo(f"Written: {out} and {beside}", err=True)


def _chosen(names: str, known: Collection[str]) -> list[str]:
    chosen = [name.strip() for name in names.split(",")]
    for name in chosen:
        if name not in known:
            raise click.UsageError(f"there is no {name!r}; known are {', '.join(known)}")
    return chosen


def compare(
    tools: list[str], faults: list[str], seeds: int, jobs: int, known: Mapping[Cell, Said] = MappingProxyType({})
) -> Comparison:
    """Every fault and every healthy twin under every tool that judges; the others run the first fault once."""
    builds = {build.__name__: build for name in faults for build in (FAULTS[name].twin, FAULTS[name].build)}
    cells = [(tool, name, seed) for tool in tools if TOOLS[tool].judges for name in builds for seed in range(seeds)]
    cells += [(tool, FAULTS[faults[0]].build.__name__, 0) for tool in tools if not TOOLS[tool].judges]

    def said(cell: Cell) -> Said:
        if cell in known:
            return known[cell]
        tool, name, seed = cell
        answer = watched(tool, builds[name], seed)
        click.echo(f"{tool}: {name}, seed {seed}", err=True)
        return answer

    with ThreadPoolExecutor(jobs) as pool:
        return Comparison(tools, faults, seeds, dict(zip(cells, pool.map(said, cells), strict=True)))


def watched(tool: str, build: Callable[[], Loop], seed: int) -> Said:
    """What a tool says about one run."""

    def train(folder: Path) -> None:
        torch.manual_seed(seed)
        loop = build()
        watcher = TOOLS[tool]()
        watcher.attach(loop.model, loop.optimizer, folder)
        loop.train(watcher)
        remarks, report = watcher.report()
        (folder / "said.json").write_text(json.dumps({"remarks": [asdict(one) for one in remarks], "report": report}))

    console, answer = run_alone(train)
    found = json.loads(answer)
    return Said(tuple(Remark(**one) for one in found["remarks"]), found["report"], console)


def run_alone(work: Callable[[Path], None]) -> tuple[str, str]:
    """Run in a separate process and an empty folder: what it printed, and the contents of `said.json`."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        process = multiprocessing.get_context("fork").Process(target=_in_folder, args=(work, folder))
        process.start()
        process.join(SECONDS)
        if process.is_alive():
            process.kill()
            process.join()
        console = (folder / "console.txt").read_text(errors="replace")
        if process.exitcode != 0:
            raise RuntimeError(f"a run ended with exit code {process.exitcode}:\n{console[-2000:]}")
        answer = folder / "said.json"
        return console.replace(name, "FOLDER"), answer.read_text() if answer.exists() else ""


def _in_folder(work: Callable[[Path], None], folder: Path) -> None:
    target = os.open(folder / "console.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.chdir(folder)
    try:
        work(folder)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)  # skip the exit handlers that the parent's threads registered


if __name__ == "__main__":
    command(prog_name="python -m benchmarks.named_faults")
