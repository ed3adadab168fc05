"""What one step of the monitor costs: milliseconds added to a step without detail and to a measured step.

Run as `python benchmarks/step_cost.py`. A watched model trains beside an unwatched copy, step by step, on one thread;
each figure is the median difference of process CPU time. One minute.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import forewarn
from forewarn.lab.data import TokenBatches, stdlib_text
from forewarn.lab.gpt import GPT, GPTConfig

WARM_UP_STEPS = 15
Made = tuple[nn.Module, Callable[[], Tensor]]


def mlp() -> Made:
    """A small MLP: what is added is the same for a larger one, except for the gradient norm."""
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    inputs = torch.randn(32, 64)
    return model, lambda: model(inputs).square().mean()


def gpt() -> Made:
    """A GPT of 4.8 million parameters in 76 tensors."""
    shape = GPTConfig(depth=6, width=256, heads=4)
    model, batches = GPT(shape), TokenBatches(stdlib_text(), 8, shape.context)
    return model, lambda: model(*next(batches))


def added(make: Callable[[], Made], num_steps: int, every: int) -> tuple[float, float]:
    """Seconds of a bare step, and seconds that watching adds to it."""
    torch.manual_seed(0)
    bare, watched = make(), make()
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-4) for model, _ in (bare, watched)]
    alone, more = [], []
    config = forewarn.Config(escalation_steps=0)
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        with forewarn.watch(watched[0], optimizers[1], run, every=every, config=config, views=[]) as monitor:
            for _ in range(num_steps):
                begin = time.process_time()
                _train(bare[1], optimizers[0])
                between = time.process_time()
                monitor.step(_train(watched[1], optimizers[1]))
                alone.append(between - begin)
                more.append(time.process_time() - between - alone[-1])
    return statistics.median(alone[WARM_UP_STEPS:]), statistics.median(more[WARM_UP_STEPS:])


def _train(compute_loss: Callable[[], Tensor], optimizer: torch.optim.Optimizer) -> Tensor:
    loss = compute_loss()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


if __name__ == "__main__":
    torch.set_num_threads(1)
    for make, num_steps in ((mlp, 1000), (gpt, 60)):
        for every, kind in ((10**9, "without detail"), (1, "measured")):
            step, cost = added(make, num_steps, every)
            print(f"{make.__name__}: a step takes {1e3 * step:.2f} ms; {kind}, forewarn adds {1e3 * cost:.2f} ms")
