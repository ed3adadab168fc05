"""The example model over several processes, as `torchrun` starts them: DDP, FSDP2 or tensor parallelism."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from forewarn.lab.gpt import GPT

WAYS = ("ddp", "fsdp", "tp")


def join(how: str, device: str) -> str:
    """Join the processes that torchrun has started; returns the device of this one."""
    if "RANK" not in os.environ or "MASTER_ADDR" not in os.environ:
        raise ValueError(
            f"--parallel {how} needs several processes; start them with "
            f"`torchrun --nproc-per-node 2 -m forewarn train lm --parallel {how}`"
        )
    kind = torch.device(device).type
    if kind == "cuda":
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    return device


def data_rank(how: str) -> tuple[int, int]:
    """The number of this process among those that have a batch of their own, and how many there are."""
    return (0, 1) if how == "tp" else (dist.get_rank(), dist.get_world_size())


def parallelized(model: GPT, how: str, device: str) -> nn.Module:
    """The GPT as `how` trains it. With tp, the feed-forward layers are split, and all others have copies."""
    model.to(device)
    if how == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh(torch.device(device).type, (dist.get_world_size(),))
    if how == "fsdp":
        from torch.distributed.fsdp import fully_shard

        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    layers: Any = model.blocks
    for block in layers:
        parallelize_module(block.mlp, mesh, {"input": ColwiseParallel(), "output": RowwiseParallel()})
    for module in model.modules():
        own = list(module.parameters(recurse=False))
        if own and not hasattr(own[0], "device_mesh"):
            _copied(module, mesh)
    if model.config.tied:  # each place got its own tensor
        model.head.weight = model.token_embedding.weight
    return model


def _copied(module: nn.Module, mesh: Any) -> None:
    """Give every process a copy of a module, as DTensors: clipping needs all parameters to be of one kind."""
    from torch.distributed.tensor import DTensor, Replicate, distribute_module

    def wrapped(_: nn.Module, inputs: tuple[Any, ...], mesh: Any) -> tuple[Any, ...]:
        return tuple(
            DTensor.from_local(value, mesh, [Replicate()], run_check=False) if isinstance(value, Tensor) else value
            for value in inputs
        )

    entering: Any = wrapped  # it returns the new inputs, whatever torch declares
    distribute_module(module, mesh, input_fn=entering, output_fn=lambda _, output, mesh: output.to_local())
