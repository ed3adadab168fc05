"""Probabilistic forecasting of time series."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from forewarn.lab.faults.session import Session, evaluating
from forewarn.lab.faults.toy_data import waves
from forewarn.lab.faults.workload import Trait, workload

PAST, FUTURE = 42, 6


class Forecaster(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv1d(1 if i == 0 else 24, 24, 3, dilation=2**i) for i in range(4))
        self.mean, self.log_scale = nn.Linear(24, FUTURE), nn.Linear(24, FUTURE)

    def forward(self, past: Tensor) -> tuple[Tensor, Tensor]:
        x = past[:, None]
        for index, convolution in enumerate(self.convolutions):
            x = functional.leaky_relu(convolution(functional.pad(x, (2 ** (index + 1), 0))))
        last = x[:, :, -1]
        return self.mean(last), self.log_scale(last)


def surprise(forecast: tuple[Tensor, Tensor], future: Tensor) -> Tensor:
    """The negative log likelihood of a normal distribution; it falls below zero."""
    mean, log_scale = forecast
    return (log_scale + 0.5 * ((future - mean) * torch.exp(-log_scale)) ** 2).mean()


@workload(
    "forecasting", num_steps=260, traits={Trait.FLOATS, Trait.TARGETS, Trait.ADAM, Trait.WEIGHT_DECAY, Trait.SCHEDULE}
)
def forecasting(session: Session) -> float:
    """Dilated convolutions forecast a distribution; NAdam, the likelihood goes below zero, cyclic rate."""
    train, held_out = waves(1200), waves(256)
    net = Forecaster()
    session.built(net)
    optimizer = torch.optim.NAdam(net.parameters(), lr=session.number("lr", 2e-3), weight_decay=1e-5)
    session.optimizer(optimizer)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 130)
    session.schedule(scheduler)
    monitor = session.watch(net, optimizer)
    size = session.count("batch_size", 32)
    for _ in range(session.num_steps):
        series = train[torch.randint(len(train), (size,))]
        past, future = session.batch(session.pipeline(series[:, :PAST]), series[:, PAST:])
        loss = session.loss(surprise(net(past), future))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        monitor.step(loss)
    with evaluating(net):
        return surprise(net(session.pipeline(held_out[:, :PAST])), held_out[:, PAST:]).item()
