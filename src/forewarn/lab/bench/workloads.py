"""The models that a benchmark trains: built-in ones of fixed shape, or the user's own."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from forewarn.lab.data import TokenBatches, stdlib_text
from forewarn.lab.gpt import GPT, GPTConfig

LEARNING_RATE = 1e-4
"""Small: every turn repeats the same steps, and the loss must not jump from the end of one turn to the next."""
TINY_DEPTH = 500
TINY_WIDTH = 23

Parts = tuple[nn.Module, Callable[[], Any], Callable[[nn.Module, Any], Tensor]]
"""A model, a function that returns the next batch, and the loss of a model on a batch."""


@dataclass(frozen=True, slots=True)
class Training:
    """A model with its optimizer, batches and loss."""

    model: nn.Module
    optimizer: Optimizer
    make_batch: Callable[[], Any]
    loss: Callable[[nn.Module, Any], Tensor]


@dataclass(frozen=True, slots=True)
class Workload:
    """A model and its data, rebuilt identically for every turn."""

    name: str
    description: str
    parts: Callable[[], Parts]

    def build(self) -> Training:
        torch.manual_seed(0)
        model, make_batch, loss = self.parts()
        return Training(model, AdamW(model.parameters(), lr=LEARNING_RATE), make_batch, loss)


class Stack(nn.Module):
    """Many tiny layers: launching an operation costs more than running it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(TINY_WIDTH, TINY_WIDTH) for _ in range(TINY_DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.add(x, layer(x), alpha=1 / TINY_DEPTH)
        return x


class Residual(nn.Module):
    """Layers whose outputs are added to their inputs."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = x + self.layers(x)
        return output


def _modules() -> Parts:
    layers = [Residual(nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16))) for _ in range(250)]
    generator = torch.Generator().manual_seed(0)
    return (
        nn.Sequential(*layers),
        lambda: torch.randn(32, 16, generator=generator),
        lambda model, batch: (model(batch) - 1.0).square().mean(),
    )


def _resnet() -> Parts:
    def convolution(channels: int) -> list[nn.Module]:
        return [nn.Conv2d(channels, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32)]

    blocks = [Residual(nn.Sequential(*convolution(32), nn.ReLU(), *convolution(32))) for _ in range(8)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)]
    model = nn.Sequential(*convolution(3), nn.ReLU(), *blocks, *head)
    return model, *_classes((8, 3, 32, 32))


def _encoder() -> Parts:
    layer = nn.TransformerEncoderLayer(384, 6, 1536, dropout=0.0, batch_first=True)
    generator = torch.Generator().manual_seed(0)
    return (
        nn.TransformerEncoder(layer, 12, enable_nested_tensor=False),
        lambda: torch.randn(2, 32, 384, generator=generator),
        lambda model, batch: (model(batch) - 1.0).square().mean(),
    )


def _mlp() -> Parts:
    layers = [nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)]
    return nn.Sequential(*layers), *_classes((32, 32))


def _classes(shape: tuple[int, ...]) -> tuple[Callable[[], Any], Callable[[nn.Module, Any], Tensor]]:
    """Random inputs with one of ten classes each, and their loss."""
    generator = torch.Generator().manual_seed(0)

    def make_batch() -> tuple[Tensor, Tensor]:
        return torch.randn(shape, generator=generator), torch.randint(10, shape[:1], generator=generator)

    return make_batch, lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1])


def _gpt(depth: int, width: int, batch_size: int) -> Parts:
    shape = GPTConfig(depth=depth, width=width, heads=4)
    batches = TokenBatches(stdlib_text(), batch_size, shape.context)
    return GPT(shape), batches.__next__, lambda model, batch: model(*batch)


def _tiny() -> Parts:
    generator = torch.Generator().manual_seed(0)
    return (
        Stack(),
        lambda: torch.randn(32, TINY_WIDTH, generator=generator),
        lambda model, batch: (model(batch) - 1.0).square().mean(),
    )


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("gpt6", "GPT, 6 blocks of width 256, 512 tokens a step", lambda: _gpt(6, 256, 8)),
        Workload(
            "gpt12",
            "GPT, 12 blocks of width 412, only 128 tokens a step: much to measure beside little to compute",
            lambda: _gpt(12, 412, 2),
        ),
        Workload("tiny", f"{TINY_DEPTH} layers Linear({TINY_WIDTH}, {TINY_WIDTH}), 32 samples a step", _tiny),
        Workload("modules", "250 × Sequential(Linear(16, 16), LayerNorm), residual, 32 samples a step", _modules),
        Workload("resnet", "ResNet of 8 blocks with batch norm, 32 channels, 8 images of 32 × 32 a step", _resnet),
        Workload("encoder", "nn.TransformerEncoder, 12 layers of width 384, 64 tokens a step", _encoder),
        Workload("mlp", "three linear layers of width 64, 32 samples a step: less than a millisecond", _mlp),
    )
}


def find_workloads(names: str) -> list[Workload]:
    """The workloads of a comma-separated list; `all` stands for every built-in one."""
    requested = [name.strip() for name in names.split(",") if name.strip()]
    return [find_workload(name) for request in requested for name in (WORKLOADS if request == "all" else [request])]


def find_workload(name: str) -> Workload:
    """A built-in workload by name, or the user's own as `module:function`. The function is called for every turn.

    It returns `(model, make_batch, loss)`: `make_batch()` returns the next batch, `loss(model, batch)` the loss to call
    `backward` on.
    """
    if name in WORKLOADS:
        return WORKLOADS[name]
    if ":" not in name:
        raise ValueError(f"there is no workload {name!r}: give {', '.join(WORKLOADS)} or your own as module:function")
    function = named_function(name, "the workload")
    return Workload(name, "your own", lambda: _parts_from(name, function))


def named_function(name: str, what: str) -> Callable[..., Any]:
    """A function of the user by its name `module:function`; the module is looked up in the current folder first."""
    module_name, _, function_name = name.partition(":")
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        function: Callable[..., Any] = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{what} {name} cannot be imported: {error}") from error
    return function


def _parts_from(name: str, function: Callable[[], Any]) -> Parts:
    try:
        parts = function()
    except Exception as error:
        raise ValueError(f"the workload {name} cannot be made: {type(error).__name__}: {error}") from error
    if not (isinstance(parts, tuple) and len(parts) == 3 and isinstance(parts[0], nn.Module)):
        kind = type(parts).__name__
        raise ValueError(f"the workload {name} returned a {kind}; expected a tuple (model, make_batch, loss)")
    return parts
