"""A Wasserstein GAN with a gradient penalty."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from forewarn.lab.faults.session import Session
from forewarn.lab.faults.toy_data import ellipse, sliced_distance
from forewarn.lab.faults.workload import Trait, workload

NOISE, PENALTY, CRITIC_STEPS = 8, 1.0, 3


def gradient_penalty(critic: nn.Module, real: Tensor, fake: Tensor) -> Tensor:
    """How far the critic's slope between the two is from 1 (Gulrajani et al. 2017)."""
    mix = torch.rand(len(real), 1)
    between = (mix * real + (1 - mix) * fake).requires_grad_()
    (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    penalty: Tensor = ((slope.norm(dim=1) - 1) ** 2).mean()
    return penalty


@workload("wgan-gp", num_steps=240, traits={Trait.PLAYERS, Trait.ADAM, Trait.FLOATS})
def wgan_gp(session: Session) -> float:
    """A critic with a gradient penalty and a generator; Adam without momentum, three critic steps per step."""
    generator = nn.Sequential(nn.Linear(NOISE, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    critic = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    both = nn.ModuleDict({"generator": generator, "critic": critic})
    session.built(both)
    rate = session.number("lr", 2e-3)
    generator_optimizer = torch.optim.Adam(generator.parameters(), lr=rate, betas=(0.0, 0.9))
    critic_optimizer = torch.optim.Adam(
        critic.parameters(), lr=session.number("discriminator_lr", rate), betas=(0.0, 0.9)
    )
    session.optimizer(generator_optimizer)
    session.optimizer(critic_optimizer)
    monitor = session.watch(both, [generator_optimizer, critic_optimizer])
    size = session.count("batch_size", 64)
    fixed, held_out = torch.randn(512, NOISE), ellipse(512)
    distance = float("nan")
    critic_loss = torch.zeros(())
    for step in range(session.num_steps):
        for _ in range(CRITIC_STEPS):
            real, _ = session.batch(session.pipeline(ellipse(size)), torch.ones(size))
            with torch.no_grad():
                fake = generator(torch.randn(size, NOISE))
            critic_optimizer.zero_grad()
            critic_loss = critic(fake).mean() - critic(real).mean() + PENALTY * gradient_penalty(critic, real, fake)
            critic_loss = session.loss(critic_loss)
            critic_loss.backward()
            critic_optimizer.step()
        generator_optimizer.zero_grad()
        generator_loss = session.loss(-critic(generator(torch.randn(size, NOISE))).mean())
        generator_loss.backward()
        generator_optimizer.step()
        if step % 10 == 0 or step == session.num_steps - 1:
            with torch.no_grad():
                distance = sliced_distance(generator(fixed), session.pipeline(held_out))
            session.report(distance)
        monitor.step(critic_loss, generator=generator_loss)
    return distance
