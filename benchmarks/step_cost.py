"""What a step of the monitor costs: milliseconds of CPU, all threads, on a step without detail and on a measured one.

Run as `python benchmarks/step_cost.py [MODEL ...]`. A watched model trains beside an unwatched copy, step by step, on
one thread. A round lasts long enough for the thread that writes the run to do its share. The cost of a round is the
process's time without twice that of the bare steps. Each figure is the median of the rounds. Four minutes.
"""

from __future__ import annotations

import statistics
import sys
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
ROUNDS = 7
ROUND_SECONDS = 1.0
Made = tuple[nn.Module, Callable[[], Tensor]]


def mlp() -> Made:
    """A small MLP: what is added is the same for a larger one, except for the gradient norm."""
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    inputs, targets = torch.randn(32, 32), torch.randint(10, (32,))
    return model, lambda: nn.functional.cross_entropy(model(inputs), targets)


class Residual(nn.Module):
    """Blocks whose outputs are added to their inputs."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def modules() -> Made:
    """Many small modules: 750 of them, 1000 tensors."""
    model = Residual(*(nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16)) for _ in range(250)))
    inputs = torch.randn(32, 16)
    return model, lambda: model(inputs).square().mean()


def resnet() -> Made:
    """Eight residual blocks of convolution and batch norm on images of 32 × 32."""

    def block() -> nn.Module:
        half = [nn.Conv2d(32, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU()]
        return nn.Sequential(*half, nn.Conv2d(32, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32))

    body = Residual(*(block() for _ in range(8)))
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)
    )
    inputs, targets = torch.randn(16, 3, 32, 32), torch.randint(10, (16,))
    return model, lambda: nn.functional.cross_entropy(model(inputs), targets)


def encoder() -> Made:
    """`nn.TransformerEncoder` with 12 layers of width 384."""
    layer = nn.TransformerEncoderLayer(384, 6, 1536, dropout=0.0, batch_first=True, norm_first=True)
    model = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False)
    inputs = torch.randn(4, 32, 384)
    return model, lambda: model(inputs).square().mean()


def gpt() -> Made:
    """A GPT of 4.8 million parameters in 76 tensors."""
    shape = GPTConfig(depth=6, width=256, heads=4)
    model, batches = GPT(shape), TokenBatches(stdlib_text(), 8, shape.context)
    return model, lambda: model(*next(batches))


def added(make: Callable[[], Made], every: int) -> tuple[float, float]:
    """Seconds of a bare step, and seconds that watching adds to it."""
    torch.manual_seed(0)
    bare, watched = make(), make()
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-4) for model, _ in (bare, watched)]
    config = forewarn.Config(escalation_steps=0)
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        with forewarn.watch(watched[0], optimizers[1], run, every=every, config=config, views=[]) as monitor:

            def both() -> float:
                begin = time.thread_time()
                _train(bare[1], optimizers[0])
                alone = time.thread_time() - begin
                monitor.step(_train(watched[1], optimizers[1]))
                return alone

            for _ in range(WARM_UP_STEPS):
                both()
            rounds = [_round(both) for _ in range(ROUNDS)]
    alone, more = zip(*rounds, strict=True)
    return statistics.median(alone), statistics.median(more)


def _round(both: Callable[[], float]) -> tuple[float, float]:
    """Seconds of a bare step and of what watching adds, as means over a round."""
    alone, begin, end = [], time.process_time(), time.perf_counter() + ROUND_SECONDS
    while time.perf_counter() < end:
        alone.append(both())
    bare = statistics.mean(alone)
    return bare, (time.process_time() - begin) / len(alone) - 2 * bare


def _train(compute_loss: Callable[[], Tensor], optimizer: torch.optim.Optimizer) -> Tensor:
    loss = compute_loss()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


if __name__ == "__main__":
    torch.set_num_threads(1)
    models = {make.__name__: make for make in (mlp, modules, resnet, encoder, gpt)}
    for name in sys.argv[1:] or models:
        for every, kind in ((10**9, "without detail"), (1, "measured")):
            step, cost = added(models[name], every)
            print(f"{name}: a step takes {1e3 * step:.2f} ms; {kind}, forewarn adds {1e3 * cost:.2f} ms", flush=True)
