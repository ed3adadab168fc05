"""Random models × optimizers × schedules: a watched run is the bare run bit for bit, with all three random states.

A seed makes the whole run: the layers and how they are wired, the optimizers, the schedule, clipping, accumulation,
checkpointing, autocast. A failure names its seed: `check(seed, path)` repeats it.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import forewarn
from tests.bitwise import plain, random_states, seed_everything

WIDTH, LENGTH, WORDS = 8, 6, 13


class Convolution(nn.Module):
    def __init__(self, choose: random.Random) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, choose.choice([1, 3]), padding="same", groups=choose.choice([1, 2]))
        self.norm = choose.choice([nn.BatchNorm1d, lambda width: nn.GroupNorm(2, width), nn.InstanceNorm1d])(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x.transpose(1, 2))).transpose(1, 2)


class Attention(nn.Module):
    """Torch's module with or without weights, or its function with dropout and a mask."""

    def __init__(self, choose: random.Random) -> None:
        super().__init__()
        self.how = choose.choice(["weights", "no weights", "function", "causal"])
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=0.1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        if self.how.endswith("weights"):
            return self.attention(x, x, x, need_weights=self.how == "weights")[0]
        heads = x.unflatten(-1, (2, -1)).transpose(1, 2)
        out = functional.scaled_dot_product_attention(
            heads, heads, heads, dropout_p=0.1 if self.training else 0.0, is_causal=self.how == "causal"
        )
        return out.transpose(1, 2).flatten(2)


class Recurrent(nn.Module):
    def __init__(self, choose: random.Random) -> None:
        super().__init__()
        self.rnn = choose.choice([nn.LSTM, nn.GRU, nn.RNN])(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(x)[0]


class Mlp(nn.Sequential):
    def __init__(self, choose: random.Random) -> None:
        activation = choose.choice([nn.ReLU, nn.GELU, nn.Tanh, nn.Sigmoid, nn.LeakyReLU, nn.Softplus, nn.PReLU])
        norm = choose.choice([nn.LayerNorm, nn.RMSNorm, lambda width: nn.Identity()])
        super().__init__(norm(WIDTH), nn.Linear(WIDTH, 12), activation(), nn.Dropout(0.2), nn.Linear(12, WIDTH))
        if choose.random() < 0.2:
            torch.nn.utils.parametrizations.weight_norm(self[1])


class Model(nn.Module):
    def __init__(self, choose: random.Random, sparse: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH, sparse=sparse, padding_idx=choose.choice([None, 0]))
        kinds: list[Callable[[random.Random], nn.Module]] = [Convolution, Attention, Recurrent, Mlp]
        layers = [choose.choice(kinds)(choose) for _ in range(choose.randint(1, 4))]
        if choose.random() < 0.4:
            layers.append(layers[0])  # the same weights twice
        self.layers = nn.ModuleList(layers)
        self.unused = nn.Linear(3, 3) if choose.random() < 0.4 else None
        self.noise = choose.random() < 0.3
        self.head = nn.Linear(WIDTH, WORDS)
        if choose.random() < 0.3 and not sparse:
            self.head.weight = self.embed.weight
        self.output = choose.choice(["tensor", "tuple", "dict", "nested"])
        self.checkpointing = choose.choice([None, None, False, True])
        if choose.random() < 0.3:
            self.head.bias.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Any:
        x = self.embed(tokens)
        if self.noise:
            x = x + torch.randn_like(x) * random.random() * float(np.random.rand())
        for layer in self.layers:
            if self.checkpointing is None or not torch.is_grad_enabled():
                x = x + layer(x)
            else:
                x = x + checkpoint(layer, x, use_reentrant=self.checkpointing)
        logits = self.head(x)
        return {
            "tensor": logits, "tuple": (logits, x), "dict": {"logits": logits, "hidden": x},
            "nested": {"parts": [(logits,), {"hidden": x}], "name": "nested"},
        }[self.output]  # fmt: skip


def logits_of(output: Any) -> Tensor:
    if isinstance(output, dict):
        return output["logits"] if "logits" in output else output["parts"][0][0]
    return output[0] if isinstance(output, tuple) else output


def made_optimizers(choose: random.Random, model: Model, sparse: bool) -> list[torch.optim.Optimizer]:
    optim = torch.optim
    parameters = list(model.parameters())
    if sparse:
        rest = [parameter for parameter in parameters if parameter is not model.embed.weight]
        return [optim.SparseAdam([model.embed.weight], 1e-2), optim.AdamW(rest, 1e-2)]
    dense: list[Callable[..., torch.optim.Optimizer]] = [
        lambda some: optim.SGD(some, 0.05, momentum=choose.choice([0.0, 0.9])),
        lambda some: optim.SGD(some, 0.05, foreach=True, weight_decay=0.01),
        lambda some: optim.Adam(some, 1e-2, amsgrad=choose.random() < 0.5),
        lambda some: optim.AdamW(some, 1e-2, foreach=True),
        lambda some: optim.AdamW(some, 1e-2, fused=True),
        lambda some: optim.Adagrad(some, 1e-2),
        lambda some: optim.RMSprop(some, 1e-3, centered=choose.random() < 0.5),
        lambda some: optim.NAdam(some, 1e-3),
        lambda some: optim.LBFGS(some, 0.1, max_iter=3),
    ]
    make = choose.choice(dense)
    if choose.random() < 0.3 and len(parameters) > 3 and make is not dense[-1]:
        half = len(parameters) // 2
        return [make(parameters[:half]), choose.choice(dense[:-1])(parameters[half:])]
    return [make([{"params": parameters}]) if make is not dense[-1] else make(parameters)]


def made_scheduler(choose: random.Random, optimizer: torch.optim.Optimizer) -> Any:
    schedules = torch.optim.lr_scheduler
    return choose.choice([
        None,
        lambda: schedules.CosineAnnealingLR(optimizer, 6),
        lambda: schedules.StepLR(optimizer, 2, 0.5),
        lambda: schedules.LinearLR(optimizer, 0.1, total_iters=4),
        lambda: schedules.ReduceLROnPlateau(optimizer, patience=1),
    ])  # fmt: skip


def train(seed: int, run: Path | None) -> Any:
    """Everything that a run leaves: losses, weights, averaged weights, optimizer and random states."""
    choose = random.Random(seed)
    seed_everything(seed)
    sparse = choose.random() < 0.15
    model = Model(choose, sparse)
    optimizers = made_optimizers(choose, model, sparse)
    make_scheduler = made_scheduler(choose, optimizers[0])
    scheduler = make_scheduler() if make_scheduler is not None else None
    passes, autocast = choose.choice([1, 1, 2, 3]), choose.random() < 0.25
    clip = choose.choice([None, "torch", "monitor"])
    closure_only = isinstance(optimizers[0], torch.optim.LBFGS)
    average = copy.deepcopy(model) if choose.random() < 0.3 else None
    every, validate = choose.choice([1, 2, 5]), choose.random() < 0.3
    monitor = None
    if run is not None:
        monitor = forewarn.watch(model, optimizers, run, every=every, views=[])
    losses = []

    def backward() -> Tensor:
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=choose_zero)
        for _ in range(passes):
            tokens = torch.randint(0, WORDS, (3, LENGTH))
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                logits = logits_of(model(tokens))
                loss = functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten()) / passes
            loss.backward()
        return loss

    choose_zero = choose.random() < 0.7
    for step in range(5):
        if closure_only:
            loss = optimizers[0].step(backward)
        else:
            loss = backward()
            clipped = list(model.parameters())[1 if sparse else 0 :]  # the first is the embedding
            if clip == "monitor" and monitor is not None and not sparse:
                monitor.clip_grad_norm_(0.5)
            elif clip is not None:
                torch.nn.utils.clip_grad_norm_(clipped, 0.5)
            for optimizer in optimizers:
                optimizer.step()
        if scheduler is not None:
            scheduler.step(*([loss.item()] if hasattr(scheduler, "patience") else []))
        if average is not None:
            with torch.no_grad():
                for mean, parameter in zip(average.parameters(), model.parameters(), strict=True):
                    mean.lerp_(parameter, 0.1)
        if validate and step == 2:
            model.eval()
            with torch.no_grad():
                model(torch.zeros(2, LENGTH, dtype=torch.long))
            model.train()
        losses.append(loss.item())
        if monitor is not None:
            monitor.step(loss)
    if monitor is not None:
        monitor.close()
        assert monitor._loop.failures == {}, f"seed {seed}: {monitor._loop.failures}"
    averaged = None if average is None else average.state_dict()
    states = [optimizer.state_dict() for optimizer in optimizers]
    return plain((losses, model.state_dict(), averaged, states, random_states()))


def check(seed: int, path: Path) -> None:
    bare, watched = train(seed, None), train(seed, path / str(seed))
    assert repr(bare) == repr(watched), f"the run of seed {seed} is another when it is watched"


@pytest.mark.parametrize("first", [0, 20])
def test_forty_random_runs_are_bit_identical(first, tmp_path):
    for seed in range(first, first + 20):
        check(seed, tmp_path)


@pytest.mark.slow
def test_four_hundred_random_runs_are_bit_identical(tmp_path):
    for seed in range(1000, 1400):
        check(seed, tmp_path)
