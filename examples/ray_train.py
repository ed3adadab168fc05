"""A training function for Ray Train, watched by forewarn: the lines with `monitor` are ours.

python examples/ray_train.py    # two workers with Ray; without it, the same function in this process

Ray starts the function in every worker and joins them in one process group, so `forewarn.watch` records on the first
worker only. Give it an absolute path that this worker can write to.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import forewarn

try:
    from ray import train as ray_train
    from ray.train.torch import TorchTrainer, prepare_model
except ImportError:
    ray_train = None


def train_loop_per_worker(config: dict[str, Any]) -> None:
    prepare: Callable[..., torch.nn.Module] = prepare_model if ray_train else torch.nn.Module.train
    report: Callable[..., None] = ray_train.report if ray_train else print
    rank = ray_train.get_context().get_world_rank() if ray_train else 0
    torch.manual_seed(0)
    model = prepare(torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"])
    generator = torch.Generator().manual_seed(rank)
    validation = torch.randn(256, 8, generator=generator)
    with forewarn.watch(model, optimizer, config["run"]) as monitor:
        for epoch in range(config["epochs"]):
            for _ in range(20):
                inputs = torch.randn(64, 8, generator=generator)
                loss = (model(inputs) - inputs[:, :1].abs()).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                monitor.step(loss)
            with torch.no_grad():
                val_loss = (model(validation) - validation[:, :1].abs()).square().mean().item()
            monitor.end_epoch(val_loss=val_loss)
            report({"epoch": epoch, "val_loss": val_loss, "alerts": len(monitor.firing)})


def main(folder: Path | None = None) -> None:
    run = (folder or Path(tempfile.mkdtemp())).absolute() / "forewarn"
    config = {"lr": 3e-3, "epochs": 3, "run": str(run)}
    if ray_train is None:
        print("ray is not installed, so the function runs in this process")
        train_loop_per_worker(config)
    else:
        workers = ray_train.ScalingConfig(num_workers=2)
        TorchTrainer(train_loop_per_worker, train_loop_config=config, scaling_config=workers).fit()


if __name__ == "__main__":
    main()
