"""Makes the stored runs and the saved state: `python -m tests.golden.record [NAME …]`, by default all of them."""

from __future__ import annotations

import sys
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

import forewarn
from tests.golden.command_line import HERE
from tests.learning_runs import LEARNING_FAULTS, healthy_epochs
from tests.metric_runs import METRIC_FAULTS
from tests.real_runs import FAULTS, Breakable, healthy

RECORDED: dict[str, Callable[[Path], forewarn.Monitor]] = {
    "loss-spike": FAULTS["L102"],
    "exploding-blocks": FAULTS["G110"],
    "frozen-weight": FAULTS["U101"],
    "optimizer-not-stepped": FAULTS["U105"],
    "weight-decay": FAULTS["W104"],
    "dead-units": FAULTS["A101"],
    "attention": FAULTS["A106"],
    "tasks": FAULTS["T101"],
    "failing-probe": FAULTS["X101"],
    "resumed": FAULTS["U108"],
    "evaluation": LEARNING_FAULTS["E101"],
    "metrics": METRIC_FAULTS["M103"],
    "lr-jump": FAULTS["U104"],
    "recovered": lambda run: recovered(run),
    "healthy-gpt": lambda run: healthy("gpt", 0, run, 100),
    "healthy-mlp": lambda run: healthy("mlp", 0, run, 100),
    "healthy-epochs": lambda run: healthy_epochs("mlp", 0, run),
}
"""A stored run of every family, and healthy ones."""

STATE = HERE / "state.pt"
SAVED_AT = 60
"""The step before which the state was saved: a layer is frozen by then, and a warning about it fires."""


def recovered(run: Path) -> forewarn.Monitor:
    """A run that gets over one absurd batch: its alerts are resolved."""
    it = Breakable(run)
    it.change_batch = lambda step, inputs: inputs * 50 if step == 80 else inputs
    return it.train(200)


def half_frozen(run: Path) -> Breakable:
    """A run whose second layer is frozen at step 20."""
    it = Breakable(run, weight_decay=0.0)

    def freeze(step: int) -> None:
        if step == 20:
            it.linears()[1].requires_grad_(False)

    it.before_step = freeze
    return it


def record_run(name: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        RECORDED[name](Path(folder) / name)
        (HERE / "stored").mkdir(exist_ok=True)
        with tarfile.open(HERE / "stored" / f"{name}.tar.xz", "w:xz") as packed:
            packed.add(Path(folder) / name, name)


def record_state() -> None:
    with tempfile.TemporaryDirectory() as folder:
        torch.save(half_frozen(Path(folder) / "run").train(SAVED_AT).state_dict(), STATE)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in sys.argv[1:] or [*RECORDED, "state"]:
        record_state() if name == "state" else record_run(name)
