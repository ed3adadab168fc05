"""A denoising diffusion model."""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from forewarn.lab.faults.session import Session
from forewarn.lab.faults.toy_data import glyphs
from forewarn.lab.faults.workload import Trait, workload

NUM_LEVELS = 100


class Denoiser(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(32, width), nn.SiLU(), nn.Linear(width, width))
        self.inner = nn.Conv2d(1, width, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.GroupNorm(4, width), nn.SiLU(), nn.Conv2d(width, width, 3, padding=1)) for _ in range(3)
        )
        self.outer = nn.Conv2d(width, 1, 3, padding=1)

    def forward(self, x: Tensor, level: Tensor) -> Tensor:
        frequencies = torch.exp(-math.log(1e3) * torch.arange(16) / 16)
        angles = level[:, None] * frequencies
        shift = self.time(torch.cat([angles.sin(), angles.cos()], 1))[:, :, None, None]
        h = self.inner(x)
        for block in self.blocks:
            h = h + block(h + shift)
        noise: Tensor = self.outer(h)
        return noise


@workload("diffusion", num_steps=220, traits={Trait.FLOATS, Trait.ADAM, Trait.WEIGHT_DECAY, Trait.WARM_UP})
def diffusion(session: Session) -> float:
    """A denoiser learns to predict noise; AdamW, linear warm-up, clipping at 1, an average of the weights."""
    train, held_out = glyphs(1024, noise=0.2)[0] / 2, glyphs(256, noise=0.2)[0] / 2
    kept = torch.cumprod(1 - torch.linspace(1e-3, 0.05, NUM_LEVELS), 0)
    model = Denoiser()
    session.built(model)
    average = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=session.number("lr", 2e-3), weight_decay=1e-4)
    session.optimizer(optimizer)
    warm_up = session.number("warm_up", 20)
    monitor = session.watch(model, optimizer)

    def loss_of(net: nn.Module, clean: Tensor, level: Tensor, noise: Tensor) -> Tensor:
        share = kept[level][:, None, None, None]
        noisy = share.sqrt() * clean + (1 - share).sqrt() * noise
        return functional.mse_loss(net(noisy, level.float()), noise)

    for step in range(session.num_steps):
        for group in optimizer.param_groups:
            group["lr"] = session.number("lr", 2e-3) * min(1.0, (step + 1) / max(1.0, warm_up))
        optimizer.zero_grad()
        rows = torch.randint(len(train), (session.count("batch_size", 24),))
        clean, _ = session.batch(session.pipeline(train[rows]), rows)
        level = torch.randint(NUM_LEVELS, (len(clean),))
        loss = session.loss(loss_of(model, clean, level, torch.randn_like(clean)))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), session.number("clip", 1.0))
        optimizer.step()
        with torch.no_grad():
            for kept_weight, weight in zip(average.parameters(), model.parameters(), strict=True):
                kept_weight.lerp_(weight, 0.05)
        monitor.step(loss)
    torch.manual_seed(0)
    with torch.no_grad():
        level = torch.arange(len(held_out)) % NUM_LEVELS
        return loss_of(average, session.pipeline(held_out), level, torch.randn_like(held_out)).item()
