"""Two tasks of one model, trained on one process or split over several."""

from typing import Any

import torch
from torch import Tensor, nn

import forewarn
from tests.rank_runs import Block, batch, readings, split

STEPS = 6


class TwoTasks(nn.Module):
    """Two blocks, which `split` shards one by one, and two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(7, 10)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.heads = nn.ModuleList([nn.Linear(10, 5), nn.Linear(10, 2)])

    def forward(self, x: Tensor) -> list[Tensor]:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return [head(x) for head in self.heads]


def made() -> nn.Module:
    torch.manual_seed(1)
    return TwoTasks().double()


def losses_of(called: nn.Module, step: int, how: str, rank: int, num_ranks: int) -> dict[str, Tensor]:
    x, y = batch(step, how, rank, num_ranks)
    kinds, values = called(x)
    return {
        "kind": nn.functional.cross_entropy(kinds, y),
        "value": 8 * (values - x[:, :2]).square().mean(),
    }


def train_tasks(
    rank: int,
    num_ranks: int,
    how: str,
    folder: str,
    settings: dict[str, Any],
    watched: bool = True,
    twice: bool = False,
) -> list[Tensor]:
    """Returns the weights, as this rank holds them; `twice` has an earlier micro-batch that is not reduced alone."""
    model = made()
    called = split(model, how)
    if how == "fsdp2, heads too":
        from torch.distributed.fsdp import fully_shard

        for part in (*model.blocks, *model.heads):
            fully_shard(part)
        fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    name = "-".join([how, *(str(value) for value in settings.values())])
    monitor = forewarn.watch(called, optimizer, f"{folder}/{name}", every=1, views=[]) if watched else None
    for step in range(STEPS):
        if twice:
            called.set_requires_gradient_sync(False)
            sum(losses_of(called, step + STEPS, how, rank, num_ranks).values()).backward()
            called.set_requires_gradient_sync(True)
        losses = losses_of(called, step, how, rank, num_ranks)
        loss = monitor.combine_losses(losses, every=1, **settings) if monitor else sum(losses.values())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if monitor is not None:
            monitor.step(loss)
    if monitor is not None:
        monitor.close()
        assert monitor._loop.failures == {}
    return [getattr(one, "to_local", lambda one=one: one)().detach().clone() for one in model.parameters()]


def of_tasks(path: Any) -> dict[tuple[str, str], list[float]]:
    return {key: values for key, values in readings(path).items() if key[0].startswith("task/")}
