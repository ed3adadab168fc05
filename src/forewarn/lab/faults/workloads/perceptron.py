"""A multi-layer perceptron, trained as in a first tutorial."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from forewarn.lab.faults.session import Session, evaluating
from forewarn.lab.faults.toy_data import glyphs
from forewarn.lab.faults.workload import Trait, workload


@workload(
    "mlp", num_steps=240,
    traits={Trait.CLASSES, Trait.TARGETS, Trait.FLOATS, Trait.ORDER, Trait.EPOCHS, Trait.RELU, Trait.SCHEDULE,
            Trait.WEIGHT_DECAY, Trait.SMOOTHING},
)  # fmt: skip
def mlp(session: Session) -> float:
    """A perceptron with three layers classifies symbols; SGD with momentum, the rate drops once per epoch."""
    images, labels = glyphs(session.count("num_samples", 1280))
    held_out, answers = glyphs(512)
    model = nn.Sequential(nn.Flatten(), nn.Linear(144, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 10))
    session.built(model)
    criterion = nn.CrossEntropyLoss(label_smoothing=session.number("label_smoothing", 0.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=session.number("lr", 0.05), momentum=0.9, weight_decay=5e-4)
    session.optimizer(optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    session.schedule(scheduler)
    monitor = session.watch(model, optimizer)

    def held_out_loss() -> float:
        with evaluating(model):
            return float(functional.cross_entropy(model(session.pipeline(held_out)), answers))

    size = session.count("batch_size", 32)
    while not session.is_over():
        order = session.order(torch.randperm(len(labels)), labels)
        for rows in order.split(size):
            inputs, targets = session.batch(session.pipeline(images[rows]), labels[rows])
            optimizer.zero_grad()
            loss = session.loss(criterion(model(inputs), targets))
            loss.backward()
            optimizer.step()
            monitor.step(loss)
            if session.is_over():
                break
        scheduler.step()
        monitor.end_epoch(val_loss=held_out_loss())
    return held_out_loss()
