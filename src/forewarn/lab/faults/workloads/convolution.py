"""A small convolutional network with batch normalization."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from forewarn.lab.faults.session import Session, evaluating
from forewarn.lab.faults.toy_data import glyphs
from forewarn.lab.faults.workload import Trait, workload


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 12, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(12)
        self.conv2 = nn.Conv2d(12, 24, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(24)
        self.dropout = nn.Dropout(0.25)
        self.fc1 = nn.Linear(24 * 3 * 3, 48)
        self.relu = nn.ReLU()
        self.fc2 = nn.Linear(48, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.max_pool2d(self.relu(self.bn1(self.conv1(x))), 2)
        x = functional.max_pool2d(self.relu(self.bn2(self.conv2(x))), 2)
        x = self.relu(self.fc1(torch.flatten(self.dropout(x), 1)))
        logits: torch.Tensor = self.fc2(x)
        return logits


@workload(
    "cnn", num_steps=200,
    traits={Trait.CLASSES, Trait.TARGETS, Trait.FLOATS, Trait.ORDER, Trait.EPOCHS, Trait.RELU, Trait.SCHEDULE,
            Trait.BATCH_NORM, Trait.ADAM},
)  # fmt: skip
def cnn(session: Session) -> float:
    """A convolutional network with batch norm and dropout classifies symbols; Adam, cosine per epoch."""
    images, labels = glyphs(session.count("num_samples", 1600), noise=1.0)
    held_out, answers = glyphs(512, noise=1.0)
    model = ConvNet()
    session.built(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=session.number("lr", 2e-3))
    session.optimizer(optimizer)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=5)
    session.schedule(scheduler)
    monitor = session.watch(model, optimizer)
    size = session.count("batch_size", 40)
    model.train()
    while not session.is_over():
        total, num = 0.0, 0
        for rows in session.order(torch.randperm(len(labels)), labels).split(size):
            x, y = session.batch(session.pipeline(images[rows]), labels[rows])
            loss = session.loss(functional.cross_entropy(model(x), y))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            monitor.step(loss.item())
            total, num = total + loss.item(), num + 1
            if session.is_over():
                break
        scheduler.step()
        with evaluating(model):
            final = functional.cross_entropy(model(session.pipeline(held_out)), answers).item()
        monitor.end_epoch(train_loss=total / num, val_loss=final)
    return final
