"""Small models, data and loops that the tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from torch import nn

import forewarn

# How long an example takes says how busy the machine is.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Two test processes share two cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _no_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """How wide the terminal of a developer or of a test process is must not show in what is printed."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture
def small() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    """Two linear layers and plain SGD, always the same."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.fixture
def watch(tmp_path: Path) -> Iterator[Callable[..., forewarn.Monitor]]:
    """`forewarn.watch` into a temporary directory, silent, closed at the end."""
    made: list[forewarn.Monitor] = []

    def start(model: nn.Module, optimizer: Any, **settings: Any) -> forewarn.Monitor:
        run = settings.pop("run", tmp_path / f"run{len(made)}")
        monitor = forewarn.watch(model, optimizer, run, **{"views": [], "every": 1, **settings})
        made.append(monitor)
        return monitor

    yield start
    for monitor in made:
        monitor.close()


def last(monitor: forewarn.Monitor, name: str, scope: str = "") -> float:
    """The newest reading of a metric."""
    return monitor.history.series(name, scope).last
