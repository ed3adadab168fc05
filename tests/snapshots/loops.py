"""Small training loops that go wrong at a known step, in a known place."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import nn

import forewarn

WRONG = 12
"""The step at which they go wrong; one that is not measured in detail."""


def train(
    model: nn.Module,
    path: Path,
    *,
    steps: int = WRONG + 1,
    settings: dict[str, Any] | None = None,
    break_it: Any = None,
) -> forewarn.Monitor:
    """Train a model of 4 inputs and 1 output; `break_it(step, inputs, targets)` may change the batch or the model."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    config = {"snapshots": {"keep_batches": 1, **(settings or {})}}
    generator = torch.Generator().manual_seed(1)
    with forewarn.watch(model, optimizer, path, views=[], config=config) as monitor:
        for step in range(steps):
            inputs = torch.randn(8, 4, generator=generator)
            targets = inputs.sum(1, keepdim=True)
            if break_it is not None:
                break_it(step, inputs, targets)
            monitor.batch(inputs, targets)
            loss = (model(inputs) - targets).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.step(loss)
    return monitor


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1))


def nan_in_sample_5(step: int, inputs: torch.Tensor, targets: torch.Tensor) -> None:
    if step == WRONG:
        inputs[5, 2] = math.nan
