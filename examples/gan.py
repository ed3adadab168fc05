"""A GAN in two modules with two optimizers, watched as one run.

python examples/gan.py

Parameters and layers are named after their model: `G.0.weight`, `D.2.bias`. `gradient/optimizer_norm` is the gradient
norm of each player, and rules such as `players-apart` compare the two.
"""

from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import forewarn


def ring(number: int) -> torch.Tensor:
    """Points around a circle: what the generator has to imitate."""
    angle = 2 * torch.pi * torch.rand(number)
    return torch.stack([angle.cos(), angle.sin()], dim=1) + 0.05 * torch.randn(number, 2)


def main(run: str | Path = "runs/gan", steps: int = 300) -> None:
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 2))
    discriminator = nn.Sequential(nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
    to_generate = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999))
    to_discriminate = torch.optim.Adam(discriminator.parameters(), lr=1e-3, betas=(0.5, 0.999))
    models, optimizers = {"G": generator, "D": discriminator}, [to_generate, to_discriminate]
    with forewarn.watch(models, optimizers, run=run) as monitor:
        for _ in range(steps):
            fake = generator(torch.randn(64, 4))
            to_discriminate.zero_grad()
            real_loss = functional.softplus(-discriminator(ring(64))).mean()
            loss_d = real_loss + functional.softplus(discriminator(fake.detach())).mean()
            loss_d.backward()
            to_discriminate.step()
            to_generate.zero_grad()
            loss_g = functional.softplus(-discriminator(fake)).mean()
            loss_g.backward()
            to_generate.step()
            monitor.step(loss_d + loss_g)  # once, after both have stepped


if __name__ == "__main__":
    main()
