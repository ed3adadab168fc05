"""One training as a pipeline: in stages by torch, in stages by hand, and in one process with the same micro-batches."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import forewarn
from tests.rank_runs import Block

STEPS, ONSET = 20, 14
MICRO_BATCHES, ROWS = 2, 8
FAULTS = ("healthy", "nan", "uncleared", "frozen")


class Part(nn.Module):
    """The model, or some of its blocks: they keep their names."""

    def __init__(self, blocks: range, is_first: bool, is_last: bool) -> None:
        super().__init__()
        self.embed = nn.Linear(7, 10) if is_first else None
        self.blocks = nn.ModuleDict({str(number): Block() for number in blocks})
        self.head = nn.Linear(10, 5) if is_last else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.embed is None else self.embed(x)
        for block in self.blocks.values():
            x = block(x)
        return x if self.head is None else self.head(x)


def whole() -> Part:
    torch.manual_seed(1)
    return Part(range(4), True, True).double()


def part(stage: int) -> Part:
    """One of two stages, with the weights of the whole."""
    model = Part(range(2 * stage, 2 * stage + 2), stage == 0, stage == 1).double()
    values = whole().state_dict()
    model.load_state_dict({name: values[name] for name in model.state_dict()})
    return model


def batch(step: int, number: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One of several copies' rows of a step's batch, with rows of each micro-batch of the whole."""
    x = torch.randn(ROWS, 7, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    y = (x[:, :5] * 3).argmax(dim=1)
    parts = ([rows.chunk(count)[number] for rows in whole.chunk(MICRO_BATCHES)] for whole in (x, y))
    x, y = map(torch.cat, parts)
    return x, y


def train(rank: int, how: str, fault: str, folder: str, watched: bool = True) -> nn.Module:
    """Train with a fault in the second stage, mostly from step `ONSET` on."""
    copies = 2 if "+" in how else 1
    stage, copy = (rank // copies, rank % copies) if how != "one" else (-1, 0)
    model = whole() if how == "one" else part(stage)
    called: nn.Module = model
    if how == "by hand+ddp":
        groups = [dist.new_group([2 * each, 2 * each + 1]) for each in range(2)]
        called = DistributedDataParallel(model, process_group=groups[stage])
    if how == "1f1b+fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stages", "shards"))["shards"]
        for block in model.blocks.values():
            fully_shard(block, mesh=mesh)
        called = fully_shard(model, mesh=mesh)
    step_of = _alone if how == "one" else _by_hand if "by hand" in how else _by_torch(called, stage, how, copies)
    left_out = "blocks.3.up" if fault == "frozen" else "nothing"
    parameters = [parameter for name, parameter in model.named_parameters() if left_out not in name]
    optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
    path = f"{folder}/{how}-{fault}"
    monitor = forewarn.watch(called, optimizer, path, every=1, views=[]) if watched else None
    for step in range(STEPS):
        x, y = batch(step, copy, copies)
        if fault == "nan" and step == ONSET and stage in (-1, 1):
            with torch.no_grad():
                model.blocks["3"].down.weight[0, 0] = float("nan")
        loss = step_of(called, stage, x, y)
        optimizer.step()
        if fault != "uncleared" or step < ONSET:
            optimizer.zero_grad()
        if monitor is not None:
            monitor.step(loss)
    if monitor is not None:
        monitor.close()
    return model


def _alone(model: nn.Module, stage: int, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    losses = []
    for rows, targets in zip(x.chunk(MICRO_BATCHES), y.chunk(MICRO_BATCHES), strict=True):
        losses.append(nn.functional.cross_entropy(model(rows), targets))
        (losses[-1] / MICRO_BATCHES).backward()
    return torch.stack(losses).mean().detach()


def _by_hand(model: nn.Module, stage: int, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor | None:
    losses = []
    for rows, targets in zip(x.chunk(MICRO_BATCHES), y.chunk(MICRO_BATCHES), strict=True):
        between = torch.empty(len(rows), 10, dtype=torch.float64)
        half = dist.get_world_size() // 2
        other = (dist.get_rank() + half) % dist.get_world_size()
        if stage == 0:
            output = model(rows)
            dist.send(output.detach(), other)
            dist.recv(between, other)
            output.backward(between)
        else:
            dist.recv(between, other)
            loss = nn.functional.cross_entropy(model(between.requires_grad_()), targets)
            (loss / MICRO_BATCHES).backward()
            dist.send(between.grad, other)
            losses.append(loss.detach())
    return torch.stack(losses).mean() if losses else None


def _by_torch(called: nn.Module, stage: int, how: str, copies: int) -> Any:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    ranks = [[copy, copies + copy] for copy in range(copies)]
    groups = [dist.new_group(each) for each in ranks]
    group = groups[dist.get_rank() % copies]
    schedule = ScheduleGPipe if how == "gpipe" else Schedule1F1B
    pipe = schedule(
        PipelineStage(called, stage, 2, torch.device("cpu"), group=group),
        MICRO_BATCHES, loss_fn=nn.functional.cross_entropy,
    )  # fmt: skip

    def step_of(called: nn.Module, stage: int, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor | None:
        if stage == 0:
            pipe.step(x)
            return None
        losses: list[torch.Tensor] = []
        pipe.step(target=y, losses=losses)
        return torch.stack(losses).mean().detach()

    return step_of


def in_turn(rank: int, cases: list[tuple[str, str]], folder: str) -> None:
    for how, fault in cases:
        train(rank, how, fault, folder)
