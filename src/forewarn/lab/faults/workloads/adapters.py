"""Fine-tuning with low-rank adapters."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from forewarn.lab.faults.session import Session, evaluating
from forewarn.lab.faults.toy_data import glyphs
from forewarn.lab.faults.workload import Trait, workload

PRETRAINING_STEPS = 120


class LowRank(nn.Module):
    """A frozen linear layer with a trainable update of rank 4 (Hu et al. 2021)."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_a = nn.Linear(base.in_features, 4, bias=False)
        self.lora_b = nn.Linear(4, base.out_features, bias=False)
        nn.init.zeros_(self.lora_b.weight)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + 2.0 * self.lora_b(self.lora_a(x))
        return out


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer1: nn.Module = nn.Linear(144, 96)
        self.layer2: nn.Module = nn.Linear(96, 96)
        self.head = nn.Linear(96, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.gelu(self.layer1(x.flatten(1)))
        logits: Tensor = self.head(functional.gelu(self.layer2(x)))
        return logits


def pretrained() -> Net:
    """A network that has learned upright symbols."""
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    images, labels = glyphs(1000)
    for _ in range(PRETRAINING_STEPS):
        rows = torch.randint(len(labels), (32,))
        optimizer.zero_grad()
        functional.cross_entropy(model(images[rows]), labels[rows]).backward()
        optimizer.step()
    return model


@workload(
    "lora", num_steps=200,
    traits={Trait.CLASSES, Trait.TARGETS, Trait.FLOATS, Trait.ADAM, Trait.WEIGHT_DECAY, Trait.ACCUMULATION,
            Trait.EPOCHS, Trait.SCHEDULE, Trait.WARM_UP},
)  # fmt: skip
def lora(session: Session) -> float:
    """Adapters of rank four adapt a classifier to turned symbols; AdamW, four micro-batches, linear decay."""
    model = pretrained()
    model.layer1, model.layer2 = LowRank(model.layer1), LowRank(model.layer2)  # type: ignore[arg-type]
    images, labels = glyphs(session.count("num_samples", 2400))
    held_out, answers = glyphs(512)
    images, held_out = images.flip(-1), held_out.flip(-1)
    session.built(model)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=session.number("lr", 5e-3), weight_decay=0.01)
    session.optimizer(optimizer)
    warm_up = session.count("warm_up", 10)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warm_up, max(0.0, 1 - step / (session.num_steps + 1)))
    )
    session.schedule(scheduler)
    monitor = session.watch(model, optimizer)
    accumulate, size = 4, session.count("batch_size", 8)
    final = float("nan")
    while not session.is_over():
        waiting = 0.0
        for index, rows in enumerate(session.order(torch.randperm(len(labels)), labels).split(size)):
            x, y = session.batch(session.pipeline(images[rows]), labels[rows])
            loss = session.loss(functional.cross_entropy(model(x), y)) / session.number("divisor", accumulate)
            loss.backward()
            waiting += loss.item()
            if (index + 1) % accumulate == 0:
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                monitor.step(waiting)
                waiting = 0.0
                if session.is_over():
                    break
        with evaluating(model):
            final = functional.cross_entropy(model(session.pipeline(held_out)), answers).item()
        monitor.end_epoch(val_loss=final)
    return final
