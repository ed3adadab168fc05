"""A generative adversarial network with the usual two optimizers."""

from __future__ import annotations

import torch
from torch import nn

from forewarn.lab.faults.session import Session
from forewarn.lab.faults.toy_data import ellipse, sliced_distance
from forewarn.lab.faults.workload import Trait, workload

NOISE = 8


@workload("gan", num_steps=500, traits={Trait.PLAYERS, Trait.ADAM, Trait.FLOATS})
def gan(session: Session) -> float:
    """A generator and a discriminator on points of an ellipse; two Adams, binary cross entropy, the sum is reported."""
    generator = nn.Sequential(
        nn.Linear(NOISE, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)
    )
    discriminator = nn.Sequential(
        nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1)
    )
    players = nn.ModuleDict({"G": generator, "D": discriminator})
    session.built(players)
    optimizer_d = torch.optim.Adam(
        discriminator.parameters(),
        lr=session.number("discriminator_lr", session.number("lr", 2e-3)),
        betas=(0.5, 0.999),
    )
    optimizer_g = torch.optim.Adam(generator.parameters(), lr=session.number("lr", 2e-3), betas=(0.5, 0.999))
    session.optimizer(optimizer_d)
    session.optimizer(optimizer_g)
    monitor = session.watch(players, [optimizer_d, optimizer_g])
    criterion = nn.BCEWithLogitsLoss()
    size = session.count("batch_size", 64)
    fixed, held_out = torch.randn(512, NOISE), ellipse(512)
    ones, zeros = torch.ones(size, 1), torch.zeros(size, 1)
    distance = float("nan")
    for step in range(session.num_steps):
        # the discriminator, on a real and on a fake batch
        real, _ = session.batch(session.pipeline(ellipse(size)), ones)
        discriminator.zero_grad()
        error_real = session.loss(criterion(discriminator(real), ones))
        error_real.backward()
        fake = generator(torch.randn(size, NOISE))
        error_fake = session.loss(criterion(discriminator(fake.detach()), zeros))
        error_fake.backward()
        optimizer_d.step()
        # the generator
        generator.zero_grad()
        error_g = session.loss(criterion(discriminator(fake), ones))
        error_g.backward()
        optimizer_g.step()
        if step % 10 == 0 or step == session.num_steps - 1:
            with torch.no_grad():
                distance = sliced_distance(generator(fixed), session.pipeline(held_out))
            session.report(distance)
        monitor.step(error_real + error_fake + error_g)
    return distance
