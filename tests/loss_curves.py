"""Loss curves of real runs of the example GPT, kept beside the tests; `python -m tests.loss_curves` records them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

from forewarn.lab.data import TokenBatches, stdlib_text
from forewarn.lab.gpt import GPT, GPTConfig

RECORDED = Path(__file__).parent / "data" / "loss_curves.npz"
STEPS = 1000
SHAPES = ("constant", "cosine")
SIZES = {"small": (1, 32), "large": (3, 48)}
"""Depth and width."""
SEEDS = 3


def curves() -> dict[str, np.ndarray]:
    """The recorded losses by the name of the run."""
    with np.load(RECORDED, allow_pickle=False) as file:
        return dict(file)


def train(depth: int, width: int, shape: str, seed: int) -> Iterator[float]:
    torch.manual_seed(seed)
    model = GPT(GPTConfig(context=32, depth=depth, heads=2, width=width, dropout=0.0))
    batches = iter(TokenBatches(stdlib_text(400_000), batch_size=8, context=32, seed=seed))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(STEPS):
        warm_up = min(1.0, (step + 1) / 50)
        decay = 0.55 + 0.45 * math.cos(math.pi * step / STEPS) if shape == "cosine" else 1.0
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * warm_up * decay
        inputs, targets = next(batches)
        logits = model(inputs)
        loss = functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item()


if __name__ == "__main__":
    torch.set_num_threads(1)
    found = {
        f"{size}-{shape}-{seed}": np.array(list(train(depth, width, shape, seed)), np.float32)
        for size, (depth, width) in SIZES.items()
        for shape in SHAPES
        for seed in range(SEEDS)
    }
    RECORDED.parent.mkdir(exist_ok=True)
    np.savez_compressed(RECORDED, **found)
