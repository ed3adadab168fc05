"""Every contender of the comparison, and how to choose among them."""

from __future__ import annotations

from benchmarks.overhead.loggers import OptimizerMetrics, TensorBoardHistograms, TensorBoardScalars
from benchmarks.overhead.matches import matched
from benchmarks.overhead.packages import (
    Pulsegrad,
    TorchModuleMonitor,
    TorchModuleMonitorOutputs,
    Torchmortem,
    Trainscope,
    Wandb,
)
from forewarn.lab.bench.contender import Contender
from forewarn.lab.bench.tiers import own_contenders

CORE = (
    "bare-again", "forewarn-every-step", "forewarn-default", "forewarn-full", "forewarn-tensors", "forewarn-outputs",
    "torch-module-monitor-tensors", "torch-module-monitor-outputs",
)  # fmt: skip
"""What takes part on every workload."""


def all_contenders() -> list[Contender]:
    """New contenders, the bare loop first."""
    return [
        *own_contenders(), *matched(), TorchModuleMonitor(), TorchModuleMonitorOutputs(), Wandb(),
        TensorBoardScalars(), TensorBoardHistograms(), OptimizerMetrics(), Torchmortem(), Trainscope(), Pulsegrad(),
    ]  # fmt: skip


def find_contenders(names: str) -> list[Contender]:
    """The contenders of a comma-separated list, with the groups `all`, `forewarn` and `core`, and the bare loop."""
    contenders = all_contenders()
    available = [contender.name for contender in contenders]
    groups = {"all": available, "forewarn": [contender.name for contender in own_contenders()], "core": CORE}
    requested: set[str] = {available[0]}
    for name in filter(None, (part.strip() for part in names.split(","))):
        if name not in groups and name not in available:
            raise ValueError(f"there is no contender {name!r}; there are all, forewarn, core, {', '.join(available)}")
        requested |= set(groups.get(name, [name]))
    return [contender for contender in contenders if contender.name in requested]
