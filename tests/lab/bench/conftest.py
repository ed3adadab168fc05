"""A workload that takes next to no time, and contenders and results made by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from forewarn.lab.bench.contender import Contender
from forewarn.lab.bench.measurements import Cost, Spread, Visits, WorkloadResult
from forewarn.lab.bench.workloads import Parts, Workload


def parts() -> Parts:
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    return model, lambda: torch.randn(3, 4, generator=generator), lambda model, batch: model(batch).square().mean()


@pytest.fixture
def small_workload() -> Workload:
    return Workload("small", "two layers", parts)


class Recording(Contender):
    """Writes down what happens to it."""

    name = "recording"
    description = "notes"

    def __init__(self) -> None:
        self.events: list[str] = []
        self.losses: list[float] = []

    def attach(self, training, turn) -> None:
        super().attach(training, turn)
        self.events.append("attach")

    def after_backward(self, loss) -> None:
        self.events.append("backward")
        self.losses.append(loss.item())

    def clip(self) -> None:
        super().clip()
        self.events.append("clip")

    def after_step(self, loss) -> None:
        self.events.append("step")

    def close(self) -> None:
        self.events.append("close")


class Failing(Recording):
    """Raises at its first step."""

    name = "failing"

    def after_step(self, loss) -> None:
        raise RuntimeError("no\nluck")


class Missing(Contender):
    name = "missing"
    description = "never there"
    package = "no_such_package_anywhere"
    install = "no-such-package"


def workload_result(name: str, *costs: Cost, num_parameters: int = 10) -> WorkloadResult:
    """A result in ten tensors, over three rounds of three steps."""
    bare = Spread(0.1, 0.1, 0.1)
    return WorkloadResult(
        name, "", num_parameters=num_parameters, num_tensors=10, optimizer="AdamW", rounds=3, steps=3,
        bare_seconds=bare, bare_operations=1, bare_syncs=0, visits=Visits(1e-3, 1.7e-3, 3.6e-3), backend="native",
        costs=costs, judging=None, absent=(),
    )  # fmt: skip
