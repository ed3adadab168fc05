"""A plain training loop, watched: the three lines with `forewarn` and `monitor` are all there is to add.

python examples/raw_loop.py            # healthy: one line at the start, one at the end
python examples/raw_loop.py --lr 3     # steps that are far too large
"""

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import forewarn


def spirals(number: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Points on three arms of a spiral, and the arm of each."""
    arms = torch.randint(3, (number,), generator=generator)
    radius = torch.rand(number, generator=generator)
    angle = 4 * radius + arms * (2 * torch.pi / 3) + 0.1 * torch.randn(number, generator=generator)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1) * 2, arms


def main(run: str | Path = "runs/raw_loop", lr: float = 0.01, steps: int = 300) -> None:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    with forewarn.watch(model, optimizer, run=run) as monitor:  # 1
        for _ in range(steps):
            inputs, targets = spirals(64, generator)
            loss = functional.cross_entropy(model(inputs), targets)
            loss.backward()
            monitor.clip_grad_norm_(1.0)  # 2: instead of torch's, so that the norm is computed once
            optimizer.step()
            optimizer.zero_grad()
            monitor.step(loss)  # 3


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lr", type=float, default=0.01)
    main(lr=parser.parse_args().lr)
