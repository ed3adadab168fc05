"""Stored runs made by hand, and the command line called as a person calls it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from forewarn.cli import main
from forewarn.config import Config
from forewarn.store import RunWriter
from forewarn.types import Block, RunInfo
from tests.page_runs import built, made, root

__all__ = ["built", "made", "root"]  # fixtures

_OPEN: list[RunWriter] = []
"""Writers of runs that must look unfinished while a test reads them."""

LAYERS = ("blocks.0.weight", "blocks.1.weight", "[red]evil[/red]\x1b[31m")
FACTS = RunInfo(
    model="[b]Net\x07",
    num_parameters=1_500_000,
    blocks=("blocks.0", "blocks.1"),
    optimizers=("AdamW",),
    started=time.time(),
)


@dataclass(frozen=True)
class Said:
    """What a command printed and how it ended."""

    code: int
    out: str
    err: str


@pytest.fixture
def forewarn(capsys: pytest.CaptureFixture[str]) -> Callable[..., Said]:
    """Calls the command line in this process."""

    def call(*arguments: str | Path) -> Said:
        with pytest.raises(SystemExit) as end:
            main([str(argument) for argument in arguments])
        printed = capsys.readouterr()
        return Said(int(end.value.code or 0), printed.out, printed.err)

    return call


def block(step: int, name: str, *values: float, scopes: tuple[str, ...] = ("",)) -> Block:
    return Block(step, time.time(), name, scopes, np.array(values, np.float32))


def blocks_of(step: int, loss: float) -> list[Block]:
    """A step of a made-up training run that is healthy but for the loss; layers are measured on every tenth."""
    blocks = [
        block(step, "train/loss", loss),
        block(step, "train/lr", 1e-3, scopes=("0",)),
        block(step, "gradient/global_norm", 1.0 + 0.01 * (step % 7)),
        block(step, "speed/step_seconds", 0.1),
    ]
    if step % 10 == 0:
        blocks += [
            block(step, "monitor/update_ratio_median", 1e-3),
            block(step, "gradient/norm", 0.5, 0.25, 0.125, scopes=LAYERS),
            block(step, "gradient/zero_fraction", 0.0, 0.25, 0.5, scopes=LAYERS),
            block(step, "weight/norm", 3.0, 4.0, 5.0 + 1e-3 * step, scopes=LAYERS),
            block(step, "update/ratio", 1e-3, 2e-3, 3e-3, scopes=LAYERS),
            block(step, "activation/std", 1.0, scopes=("blocks.0",)),
        ]
    return blocks


def write_run(path: Path, losses: list[float], end: str | None = "completed", config: Config | None = None) -> Path:
    """A stored run with these losses; without an end it is one that still trains."""
    writer = RunWriter(path, info=FACTS, config=(config or Config()).to_dict())
    for step, loss in enumerate(losses):
        writer.append(step, blocks_of(step, loss))
    if end is None:
        writer.flush()
        _OPEN.append(writer)
    else:
        writer.close(end)
    return path


def falling(steps: int) -> list[float]:
    """A healthy loss: 5 down to 2, with a little noise."""
    noise = np.random.default_rng(0).normal(0, 0.01, steps)
    return list(2 + 3 * np.exp(-np.arange(steps) / (steps / 4)) + noise)


@pytest.fixture(autouse=True)
def _no_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """As wide as a file, wherever the tests run."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture(autouse=True)
def _closed_writers() -> Iterator[None]:
    yield
    while _OPEN:
        _OPEN.pop().close()


@pytest.fixture
def healthy(tmp_path: Path) -> Path:
    return write_run(tmp_path / "runs" / "healthy", falling(300))


@pytest.fixture
def lost(tmp_path: Path) -> Path:
    """A run whose loss jumps from 2 to 500 and stays there."""
    return write_run(tmp_path / "runs" / "lost", falling(300) + [500.0 + step for step in range(30)])
