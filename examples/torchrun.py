"""Several processes, as one run: call `watch` and `monitor.step` on every rank, as on one.

torchrun --nproc-per-node 2 examples/torchrun.py                    # copies of the model: DDP
torchrun --nproc-per-node 2 examples/torchrun.py --parallel fsdp    # shards of it: FSDP2

Rank 0 records and judges the run. Norms, means and counts are those of the whole training, not of one rank.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import forewarn


class Block(nn.Module):
    """A residual block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(x)


def parallel(model: nn.Module, how: str) -> nn.Module:
    """The model over all ranks."""
    if how == "ddp":
        return DistributedDataParallel(model)
    for block in model:
        if isinstance(block, Block):
            fully_shard(block)
    fully_shard(model)
    return model


def main(run: str | Path, how: str, steps: int = 100) -> None:
    dist.init_process_group("gloo")  # "nccl" on GPUs
    torch.manual_seed(0)  # the same weights on every rank
    model = parallel(nn.Sequential(nn.Linear(8, 32), Block(32), Block(32), nn.Linear(32, 1)), how)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(dist.get_rank())  # other data on every rank
    with forewarn.watch(model, optimizer, run=run) as monitor:
        for _ in range(steps):
            inputs = torch.randn(32, 8, generator=generator)
            loss = (model(inputs) - inputs.square().sum(1, keepdim=True)).square().mean()
            loss.backward()
            monitor.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            monitor.step(loss)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parallel", choices=["ddp", "fsdp"], default="ddp")
    parser.add_argument("--folder", default="runs/torchrun")
    given = parser.parse_args()
    main(given.folder, given.parallel)
