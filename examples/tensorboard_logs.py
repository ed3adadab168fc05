"""A run that forewarn never saw, judged afterwards from its TensorBoard logs. No training is repeated.

pip install '.[torch,tensorboard]'
python examples/tensorboard_logs.py

The loop logs loss and learning rate, as many do. Its learning rate leaps to 30 times its value in the middle.
"""

import subprocess
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.tensorboard import SummaryWriter


def train(folder: Path, steps: int = 400) -> None:
    """An ordinary loop without forewarn."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    with SummaryWriter(folder) as writer:
        for step in range(steps):
            if step == steps // 2:
                optimizer.param_groups[0]["lr"] *= 30
            inputs = torch.randn(256, 8)
            loss = (model(inputs) - inputs[:, :2].sin().sum(dim=1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            writer.add_scalar("train/loss", loss.item(), step)
            writer.add_scalar("train/lr", optimizer.param_groups[0]["lr"], step)


def main(folder: str | Path = "runs/tensorboard_logs") -> int:
    train(Path(folder))
    return subprocess.run([sys.executable, "-m", "forewarn", "check", str(folder)]).returncode


if __name__ == "__main__":
    sys.exit(main())
