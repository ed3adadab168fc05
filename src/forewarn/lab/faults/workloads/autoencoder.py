"""Variational autoencoders, with a loss that is summed over the batch and with one that is averaged."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from forewarn.lab.faults.session import Session, evaluating
from forewarn.lab.faults.toy_data import glyphs
from forewarn.lab.faults.workload import Trait, workload


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(144, 96)
        self.fc21, self.fc22 = nn.Linear(96, 8), nn.Linear(96, 8)
        self.fc3 = nn.Linear(8, 96)
        self.fc4 = nn.Linear(96, 144)

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = functional.relu(self.fc1(x))
        return self.fc21(h), self.fc22(h)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mu, logvar = self.encode(x)
        z = mu + torch.exp(0.5 * logvar) * torch.randn_like(mu)
        return torch.sigmoid(self.fc4(functional.relu(self.fc3(z)))), mu, logvar


def pictures(num: int) -> Tensor:
    """Symbols with values between 0 and 1, flattened."""
    return torch.sigmoid(2 * glyphs(num, noise=0.3)[0].flatten(1))


def divergence(mu: Tensor, logvar: Tensor) -> Tensor:
    return -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())


@workload("vae-sum", kind="vae", num_steps=240, traits={Trait.FLOATS, Trait.VARIATIONAL, Trait.ADAM, Trait.RELU})
def vae_sum(session: Session) -> float:
    """A variational autoencoder; cross entropy and divergence summed over the batch, Adam, nothing clipped."""
    train, held_out = pictures(1600), pictures(256)
    model = VAE()
    session.built(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=session.number("lr", 1e-3))
    session.optimizer(optimizer)
    monitor = session.watch(model, optimizer)
    size = session.count("batch_size", 64)
    weight = session.number("divergence_weight", 1.0)
    model.train()
    while not session.is_over():
        for rows in torch.randperm(len(train)).split(size):
            data, targets = session.batch(session.pipeline(train[rows]), train[rows])
            optimizer.zero_grad()
            recon, mu, logvar = model(data)
            loss = functional.binary_cross_entropy(recon, targets.clamp(0, 1), reduction="sum") + weight * divergence(
                mu, logvar
            )
            loss = session.loss(loss)
            loss.backward()
            optimizer.step()
            monitor.step(loss)
            if session.is_over():
                break
    torch.manual_seed(0)
    with evaluating(model):
        recon, mu, logvar = model(session.pipeline(held_out))
        bound = functional.binary_cross_entropy(recon, held_out, reduction="sum") + divergence(mu, logvar)
        return bound.item() / len(held_out)


@workload(
    "vae-mean", kind="vae", num_steps=240,
    traits={Trait.FLOATS, Trait.VARIATIONAL, Trait.ADAM, Trait.RELU, Trait.ANNEALED},
)  # fmt: skip
def vae_mean(session: Session) -> float:
    """A variational autoencoder; squared error and divergence averaged, the divergence warmed up, RMSprop."""
    train, held_out = pictures(1600), pictures(256)
    model = VAE()
    session.built(model)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=session.number("lr", 1e-3))
    session.optimizer(optimizer)
    monitor = session.watch(model, optimizer)
    size = session.count("batch_size", 32)
    for step in range(session.num_steps):
        rows = torch.randint(len(train), (size,))
        x, y = session.batch(session.pipeline(train[rows]), train[rows])
        reconstruction, mean, logvar = model(x)
        squared = functional.mse_loss(reconstruction, y)
        weight = session.number("divergence_weight", 1e-3) * min(1.0, step / session.number("annealing", 20))
        loss = session.loss(squared + weight * divergence(mean, logvar) / len(x))
        model.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss.detach())
    torch.manual_seed(0)
    with evaluating(model):
        reconstruction, mean, logvar = model(session.pipeline(held_out))
        bound = functional.mse_loss(reconstruction, held_out) + 1e-3 * divergence(mean, logvar) / len(held_out)
        return bound.item()
