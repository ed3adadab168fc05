"""`forewarn selftest`: whether forewarn keeps its promises on your machine."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.console import RenderableType

    from forewarn.lab.selftest import Result

FAILED = 1
"""Exit code if a check fails."""


@click.command()
@click.option(
    "--device", default="cpu", show_default=True, metavar="DEVICE", help="Where to train: cpu, cuda, cuda:1, mps."
)
@click.option("--json", "wants_json", is_flag=True, help="Print one JSON object and nothing else.")
def command(device: str, wants_json: bool) -> None:
    """Check in a minute that forewarn works on this machine and device.

    Three small models train with and without it: a perceptron, convolutions and a transformer.

    \b
    Checks:
      same bits        training gives the same bits, measured or not
      right numbers    each way to read tensors agrees with double precision
      no waiting       the host never waits for the device
      cost             what is added to a step read in brief, and in detail

    The exit code is 1 if a check fails. The cost is only shown. Please send the output with --json if you report a bug,
    above all from a GPU.

    \b
    Examples:
      forewarn selftest
      forewarn selftest --device cuda
      forewarn selftest --json > selftest.json
    """
    from forewarn.cli.terminal import busy, print_json, show, torch_on

    torch_on(device)
    from dataclasses import asdict

    from forewarn.lab.bench.measurements import this_machine
    from forewarn.lab.selftest import device_name, run_checks

    machine = this_machine(("forewarn", "torch", "triton", "numpy"))
    with tempfile.TemporaryDirectory(prefix="forewarn-selftest-") as folder, busy("testing…"):
        results = list(run_checks(device, Path(folder)))
    passed = not any(result.passed is False for result in results)
    if wants_json:
        plain = [asdict(result) for result in results]
        print_json({"passed": passed, "device": device_name(device), "machine": asdict(machine), "results": plain})
    else:
        versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
        show(f"{device_name(device)}; {versions}\n", _table(results), f"\n{_verdict(results)}")
    if not passed:
        raise click.exceptions.Exit(FAILED)


def _table(results: Sequence[Result]) -> RenderableType:
    from forewarn.cli.terminal import quiet_table

    table = quiet_table()
    for heading in ("", "check", "on", "result"):
        table.add_column(heading, no_wrap=heading != "result")
    marks = {True: ("✓", None), False: ("✖", "bold red"), None: ("·", "dim")}
    for result in results:
        mark, style = marks[result.passed]
        table.add_row(mark, result.check, result.subject, result.words, style=style)
    return table


def _verdict(results: Sequence[Result]) -> str:
    failed = sum(result.passed is False for result in results)
    judged = sum(result.passed is not None for result in results)
    return f"{failed} of {judged} checks failed" if failed else f"All {judged} checks passed"
