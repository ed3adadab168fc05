"""Two tasks on a shared trunk."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from forewarn.lab.faults.session import Session, evaluating
from forewarn.lab.faults.toy_data import glyphs
from forewarn.lab.faults.workload import Trait, workload


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(144, 96), nn.Tanh(), nn.Linear(96, 64), nn.Tanh())
        self.symbol = nn.Linear(64, 10)
        self.contrast = nn.Linear(64, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.trunk(x.flatten(1))
        return {"symbol": self.symbol(hidden), "contrast": self.contrast(hidden).squeeze(1)}


@workload(
    "two-task",
    num_steps=240,
    traits={Trait.TASKS, Trait.TARGETS, Trait.FLOATS, Trait.WEIGHT_DECAY, Trait.ADAM, Trait.TANH},
)
def two_task(session: Session) -> float:
    """A trunk with two heads: which symbol, and how strong its contrast; AdamW, a weighted sum, clipping."""
    images, labels = glyphs(1600)
    held_out, answers = glyphs(512)
    model = Shared()
    session.built(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=session.number("lr", 2e-3), weight_decay=0.01)
    session.optimizer(optimizer)
    monitor = session.watch(model, optimizer)
    weights = {"symbol": 1.0, "contrast": session.number("task_weight", 1.0)}
    size = session.count("batch_size", 32)
    for step in range(session.num_steps):
        first = step * size % (len(images) - size)
        rows = torch.arange(first, first + size)
        x, y = session.batch(session.pipeline(images[rows]), labels[rows])
        contrast = images[rows].flatten(1).std(1)
        optimizer.zero_grad(set_to_none=True)
        outputs = model(x)
        losses = {
            "symbol": functional.cross_entropy(outputs["symbol"], y),
            "contrast": functional.mse_loss(outputs["contrast"], contrast),
        }
        loss = session.loss(monitor.combine_losses(losses, weights))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), session.number("clip", 5.0))
        optimizer.step()
        monitor.step(loss)
    with evaluating(model):
        outputs = model(session.pipeline(held_out))
        contrast = held_out.flatten(1).std(1)
        return (
            functional.cross_entropy(outputs["symbol"], answers) + functional.mse_loss(outputs["contrast"], contrast)
        ).item()
