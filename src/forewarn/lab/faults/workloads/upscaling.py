"""Super-resolution: a small image is made larger."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from forewarn.lab.faults.session import Session, evaluating
from forewarn.lab.faults.toy_data import scenes
from forewarn.lab.faults.workload import Trait, workload


class Upscaler(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 24, 5, padding=2)
        self.conv2 = nn.Conv2d(24, 24, 3, padding=1)
        self.conv3 = nn.Conv2d(24, 4, 3, padding=1)
        self.shuffle = nn.PixelShuffle(2)
        self.relu = nn.ReLU()
        for conv in (self.conv1, self.conv2):
            nn.init.orthogonal_(conv.weight, nn.init.calculate_gain("relu"))
        nn.init.orthogonal_(self.conv3.weight)

    def forward(self, x: Tensor) -> Tensor:
        sharp: Tensor = self.shuffle(self.conv3(self.relu(self.conv2(self.relu(self.conv1(x))))))
        return sharp


@workload(
    "super-resolution", num_steps=200,
    traits={Trait.FLOATS, Trait.TARGETS, Trait.RELU, Trait.ADAM, Trait.ACCUMULATION, Trait.EPOCHS, Trait.SCHEDULE},
)  # fmt: skip
def super_resolution(session: Session) -> float:
    """A convolutional upscaler with pixel shuffle; Adam, bfloat16 autocast, two micro-batches, rate per epoch."""
    sharp, checked = scenes(session.count("num_samples", 800))[0], scenes(128)[0]
    model = Upscaler()
    session.built(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=session.number("lr", 1e-3))
    session.optimizer(optimizer)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.8)
    session.schedule(scheduler)
    monitor = session.watch(model, optimizer)
    micro, size = 2, session.count("batch_size", 8)

    def checked_loss() -> float:
        with evaluating(model):
            return functional.mse_loss(model(session.pipeline(functional.avg_pool2d(checked, 2))), checked).item()

    while not session.is_over():
        losses: list[float] = []
        for index, rows in enumerate(session.order(torch.randperm(len(sharp)), sharp).split(size)):
            targets = sharp[rows]
            inputs, targets = session.batch(session.pipeline(functional.avg_pool2d(targets, 2)), targets)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = functional.mse_loss(model(inputs).float(), targets)
            loss = session.loss(loss)
            (loss / session.number("divisor", micro)).backward()
            losses.append(loss.item())
            if (index + 1) % micro == 0:
                optimizer.step()
                optimizer.zero_grad()
                monitor.step(sum(losses[-micro:]) / micro)
                if session.is_over():
                    break
        optimizer.zero_grad()
        scheduler.step()
        monitor.end_epoch(train_loss=sum(losses) / len(losses), val_loss=checked_loss())
    return checked_loss()
