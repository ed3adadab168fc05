"""Contrastive learning with two views of each sample."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from forewarn.lab.faults.session import Session, evaluating
from forewarn.lab.faults.toy_data import glyphs
from forewarn.lab.faults.workload import Trait, workload


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Flatten(), nn.Linear(144, 96), nn.Tanh(), nn.Linear(96, 64), nn.Tanh())
        self.projector = nn.Linear(64, 24)

    def forward(self, x: Tensor) -> Tensor:
        return functional.normalize(self.projector(self.backbone(x)), dim=1)


def agreement(first: Tensor, second: Tensor, temperature: float = 0.2) -> Tensor:
    """The contrastive loss of two views (van den Oord et al. 2018)."""
    likeness = first @ second.T / temperature
    return functional.cross_entropy(likeness, torch.arange(len(first)))


@workload("siamese", num_steps=220, traits={Trait.FLOATS, Trait.TARGETS, Trait.ADAM, Trait.TANH})
def siamese(session: Session) -> float:
    """Two views of a symbol are pulled together, others apart; RMSprop, rate halved when the loss stalls."""
    images, held_out = glyphs(1600, noise=0.3)[0], glyphs(256, noise=0.3)[0]
    net = Encoder()
    session.built(net)
    optimizer = torch.optim.RMSprop(net.parameters(), lr=session.number("lr", 1e-3), alpha=0.99)
    session.optimizer(optimizer)
    monitor = session.watch(net, optimizer)
    size = session.count("batch_size", 48)
    for _ in range(session.num_steps):
        clean = images[torch.randint(len(images), (size,))]
        one, two = clean + 0.4 * torch.randn_like(clean), clean + 0.4 * torch.randn_like(clean)
        one, two = session.batch(session.pipeline(one), session.pipeline(two))
        loss = session.loss(agreement(net(one), net(two)))
        loss.backward()
        optimizer.step()
        net.zero_grad()
        monitor.step(float(loss.detach()))
    torch.manual_seed(0)
    with evaluating(net):
        views = [net(session.pipeline(held_out + 0.4 * torch.randn_like(held_out))) for _ in range(2)]
        return agreement(*views).item()
