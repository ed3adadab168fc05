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


class Log(nn.Module):
    """log(relu(x)): -∞ where an input is not positive."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.log(torch.relu(x) + (1.0 if self.is_safe else 0.0))

    is_safe = True


class WithLog(nn.Module):
    """A logarithm in a middle module."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.log, self.last = nn.Linear(4, 8), Log(), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.log(self.first(x)))


class OwnCode(WithLog):
    """The same, in the code of the model itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.log(torch.relu(self.first(x))))


class Root(nn.Module):
    """The gradient of sqrt is infinite at 0, where its value is fine."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sqrt((x - x.detach()).abs() + (1.0 if self.is_safe else 0.0)) + x

    is_safe = True


class WithRoot(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.root, self.last = nn.Linear(4, 8), Root(), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.root(self.first(x)))


class Tagger(nn.Module):
    """A transformer that takes a dict of arguments and returns an object with a loss, as those of Hugging Face do."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.1)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 3)

    def forward(self, input_ids: torch.Tensor, scale: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        mask = nn.Transformer.generate_square_subsequent_mask(input_ids.shape[1])
        hidden = self.encoder(self.embedding(input_ids) * scale[:, None, None], mask=mask, is_causal=True)
        logits = self.head(hidden)
        loss = None if labels is None else nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


def make_small() -> nn.Module:
    return small()


def make_with_log() -> nn.Module:
    torch.manual_seed(0)
    model = WithLog()
    model.log.is_safe = False
    return model


def make_own_code() -> nn.Module:
    torch.manual_seed(0)
    return OwnCode()


def make_with_root() -> nn.Module:
    torch.manual_seed(0)
    model = WithRoot()
    model.root.is_safe = False
    return model


def make_tagger() -> nn.Module:
    torch.manual_seed(0)
    return Tagger()


def make_gan() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    return {
        "G": nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 4)),
        "D": nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)),
    }


def fails() -> nn.Module:
    raise RuntimeError("no such dataset")


def returns_nothing() -> None: ...


def not_a_number(output: torch.Tensor, targets: torch.Tensor) -> str:
    return "three"
