"""A vision transformer."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from forewarn.lab.faults.session import Session, evaluating
from forewarn.lab.faults.toy_data import glyphs
from forewarn.lab.faults.workload import Trait, workload

PATCH, WIDTH = 3, 48


class EncoderBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 96), nn.GELU(), nn.Linear(96, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class ViT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, WIDTH, PATCH, PATCH)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.positions = nn.Parameter(0.02 * torch.randn(1, 17, WIDTH))
        self.encoder = nn.Sequential(EncoderBlock(), EncoderBlock())
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1) + self.positions
        logits: Tensor = self.head(self.norm(self.encoder(x))[:, 0])
        return logits


@workload(
    "vit", num_steps=220,
    traits={Trait.CLASSES, Trait.TARGETS, Trait.FLOATS, Trait.ORDER, Trait.EPOCHS, Trait.ATTENTION, Trait.WARM_UP,
            Trait.SCHEDULE, Trait.ADAM, Trait.WEIGHT_DECAY, Trait.SMOOTHING},
)  # fmt: skip
def vit(session: Session) -> float:
    """A vision transformer with two blocks; AdamW, linear warm-up then cosine in two schedulers, clipping at 1."""
    images, labels = glyphs(session.count("num_samples", 1920), noise=0.5)
    held_out, answers = glyphs(384, noise=0.5)
    model = ViT()
    session.built(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=session.number("lr", 2e-3), weight_decay=0.05)
    session.optimizer(optimizer)
    warm_up = session.count("warm_up", 20)
    schedulers = torch.optim.lr_scheduler
    scheduler = schedulers.SequentialLR(
        optimizer,
        [schedulers.LinearLR(optimizer, 0.05 if warm_up > 1 else 1.0, total_iters=warm_up),
         schedulers.CosineAnnealingLR(optimizer, session.num_steps - warm_up)],
        milestones=[warm_up],
    )  # fmt: skip
    session.schedule(scheduler)
    monitor = session.watch(model, optimizer)
    smoothing = session.number("label_smoothing", 0.05)
    final = float("nan")
    epoch = 0
    while not session.is_over():
        order = session.order(torch.randperm(len(labels)), labels)
        for rows in order.split(session.count("batch_size", 32)):
            inputs, targets = session.batch(session.pipeline(images[rows]), labels[rows])
            outputs = model(inputs)
            loss = session.loss(functional.cross_entropy(outputs, targets, label_smoothing=smoothing))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), session.number("clip", 1.0))
            optimizer.step()
            scheduler.step()
            monitor.step(loss)
            if session.is_over():
                break
        epoch += 1
        with evaluating(model):
            final = functional.cross_entropy(model(session.pipeline(held_out)), answers).item()
        monitor.end_epoch(val_loss=final)
    return final
