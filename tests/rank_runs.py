"""One training, split over processes in several ways: model, data and seeds are the same in all of them."""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import forewarn
from forewarn.measure.module_tree import clean_name

ROWS = 12
"""Rows of the whole batch, which 1, 2, 3 and 4 ranks divide equally."""
STEPS = 24
ONSET = 16
FAULTS = ("healthy", "nan", "uncleared", "frozen")


METRICS = [
    forewarn.ActivationMetric("mean", lambda x: x),
    forewarn.GradientMetric("norm"),
    forewarn.GradientMetric("sum", torch.sum, reduce="sum"),
    forewarn.ParameterMetric("size", torch.norm, reduce="l2"),
    forewarn.ParameterDifferenceMetric("abs_max"),
]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(10)
        self.up = nn.Linear(10, 26)
        self.act = nn.ReLU()
        self.down = nn.Linear(26, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))


class Model(nn.Module):
    """Its tensors have sizes that no number of ranks divides; the smallest leaves ranks with empty shards."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(7, 10)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.scale = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(10, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x * self.scale)


def _squared_distance(now: torch.Tensor, then: torch.Tensor) -> torch.Tensor:
    return (now - then).square().sum()


def made() -> nn.Module:
    torch.manual_seed(1)
    return Model().double()  # rounding differs between the ways to split, and must not decide a comparison


def split(model: nn.Module, how: str) -> nn.Module:
    """The model as `how` trains it."""
    if how == "ddp":
        return DistributedDataParallel(model)
    if how in ("fsdp2", "hsdp", "fsdp2+tp"):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh: Any = None
        if how == "hsdp":
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
        if how == "fsdp2+tp":
            both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
            mesh = both["data"]
            _in_parallel(model, both["tensor"])
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    if how == "tp":
        from torch.distributed.device_mesh import init_device_mesh

        _in_parallel(model, init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
    if how == "fsdp1":
        from torch.distributed.fsdp import FullyShardedDataParallel
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        return FullyShardedDataParallel(
            model, use_orig_params=True, auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=torch.device("cpu")
        )
    return model


def _in_parallel(model: nn.Module, mesh: Any) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def batch(step: int, how: str, rank: int, num_ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's rows of the batch of a step."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(ROWS, 7, generator=generator, dtype=torch.float64)
    y = (x[:, :5] * 3).argmax(dim=1)
    number, count = {"tp": (0, 1), "fsdp2+tp": (rank // 2, 2)}.get(how, (rank, num_ranks))
    mine = slice(number * ROWS // count, (number + 1) * ROWS // count)
    return x[mine], y[mine]


def train(rank: int, num_ranks: int, how: str, fault: str, folder: str, watched: bool = True) -> nn.Module:
    """Train with a fault, mostly from step `ONSET` on; returns the model as it was called."""
    model = made()
    called = split(model, how)
    left_out = "blocks.1.up" if fault == "frozen" else "nothing"
    parameters = [p for name, p in model.named_parameters() if left_out not in clean_name(name)]
    optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
    monitor = None
    if watched:
        moved = forewarn.ParameterDifferenceMetric("moved", _squared_distance, reduce="sum", reference=made())
        metrics = [*METRICS, moved]
        monitor = forewarn.watch(called, optimizer, f"{folder}/{how}-{fault}", every=1, views=[], metrics=metrics)
    for step in range(STEPS):
        x, y = batch(step, how, rank, num_ranks)
        if fault == "nan" and step >= ONSET:
            x = x * float("nan")
        loss = nn.functional.cross_entropy(called(x), y)
        loss.backward()
        optimizer.step()
        if fault != "uncleared" or step < ONSET:
            optimizer.zero_grad()
        if monitor is not None:
            monitor.step(loss)
    if monitor is not None:
        monitor.close()
    return called


def in_turn(rank: int, num_ranks: int, cases: list[tuple[str, str]], folder: str) -> None:
    """Train several cases: starting processes takes longer than that."""
    for how, fault in cases:
        train(rank, num_ranks, how, fault, folder)


def readings(path: Path) -> dict[tuple[str, str], list[float]]:
    """Every series of a run by name and scope, except those of the machine and of single ranks."""
    with forewarn.open_run(path) as run:
        return {
            (name, scope): run.series(name, scope).values.tolist()
            for name in run.names()
            if name.partition("/")[0] not in ("rank", "speed", "system")
            for scope in run.scopes(name)
        }


def alerts(path: Path) -> list[tuple[str, str, int, int]]:
    """All alerts but those about time, which another process on the machine may cause."""
    with forewarn.open_run(path) as run:
        found = [alert for alert in run.alerts() if alert.code[0] != "P" and alert.name != "straggler"]
    return sorted((alert.code, alert.scope, alert.since, alert.fired) for alert in found)
