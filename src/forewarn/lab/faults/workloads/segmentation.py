"""Segmentation with an encoder, a decoder and skip connections."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from forewarn.lab.faults.session import Session, evaluating
from forewarn.lab.faults.toy_data import scenes
from forewarn.lab.faults.workload import Trait, workload


def double(num_in: int, num_out: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(num_in, num_out, 3, padding=1), nn.BatchNorm2d(num_out), nn.ReLU(),
        nn.Conv2d(num_out, num_out, 3, padding=1), nn.BatchNorm2d(num_out), nn.ReLU(),
    )  # fmt: skip


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = double(1, 8), double(8, 16)
        self.up = nn.ConvTranspose2d(16, 8, 2, 2)
        self.merge = double(16, 8)
        self.out = nn.Conv2d(8, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        fine = self.down1(x)
        coarse = self.down2(functional.max_pool2d(fine, 2))
        mask: Tensor = self.out(self.merge(torch.cat([fine, self.up(coarse)], 1)))
        return mask


def dice_loss(logits: Tensor, masks: Tensor) -> Tensor:
    shares = torch.sigmoid(logits)
    return 1 - (2 * (shares * masks).sum() + 1) / (shares.sum() + masks.sum() + 1)


@workload(
    "segmentation", num_steps=150,
    traits={Trait.FLOATS, Trait.TARGETS, Trait.RELU, Trait.BATCH_NORM, Trait.ADAM, Trait.EPOCHS},
)  # fmt: skip
def segmentation(session: Session) -> float:
    """A small U-Net finds discs; RMSprop with momentum, cross entropy plus Dice, rate lowered on a plateau."""
    images, masks = scenes(session.count("num_samples", 600))
    held_out, answers = scenes(96)
    model = UNet()
    session.built(model)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=session.number("lr", 1e-3), momentum=0.5)
    session.optimizer(optimizer)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=2)
    monitor = session.watch(model, optimizer)

    def checked() -> float:
        with evaluating(model):
            logits = model(session.pipeline(held_out))
            return (functional.binary_cross_entropy_with_logits(logits, answers) + dice_loss(logits, answers)).item()

    while not session.is_over():
        order = session.order(torch.randperm(len(images)), masks)
        for rows in order.split(session.count("batch_size", 16)):
            x, y = session.batch(session.pipeline(images[rows]), masks[rows])
            logits = model(x)
            loss = functional.binary_cross_entropy_with_logits(logits, y) + dice_loss(logits, y)
            loss = session.loss(loss)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            monitor.step(loss)
            if session.is_over():
                break
        value = checked()
        scheduler.step(value)
        monitor.end_epoch(val_loss=value)
    return checked()
