"""A residual network, trained as residual networks are."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from forewarn.lab.faults.session import Session, evaluating
from forewarn.lab.faults.toy_data import glyphs
from forewarn.lab.faults.workload import Trait, workload


class BasicBlock(nn.Module):
    def __init__(self, num_in: int, num_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(num_in, num_out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(num_out)
        self.conv2 = nn.Conv2d(num_out, num_out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(num_out)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or num_in != num_out:
            self.shortcut = nn.Sequential(nn.Conv2d(num_in, num_out, 1, stride, bias=False), nn.BatchNorm2d(num_out))

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += self.shortcut(x)
        result: Tensor = self.relu(out)
        return result


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.layer1 = nn.Sequential(BasicBlock(8, 8, 1), BasicBlock(8, 8, 1))
        self.layer2 = nn.Sequential(BasicBlock(8, 16, 2), BasicBlock(16, 16, 1))
        self.layer3 = nn.Sequential(BasicBlock(16, 32, 2), BasicBlock(32, 32, 1))
        self.fc = nn.Linear(32, 10)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer3(self.layer2(self.layer1(self.stem(x))))
        logits: Tensor = self.fc(x.mean((2, 3)))
        return logits


@workload(
    "resnet", num_steps=150,
    traits={Trait.CLASSES, Trait.TARGETS, Trait.FLOATS, Trait.ORDER, Trait.EPOCHS, Trait.RELU, Trait.SCHEDULE,
            Trait.BATCH_NORM, Trait.WEIGHT_DECAY, Trait.SMOOTHING, Trait.WARM_UP},
)  # fmt: skip
def resnet(session: Session) -> float:
    """A residual network with six blocks; SGD with Nesterov momentum, warm-up and cosine per step, label smoothing."""
    images, labels = glyphs(session.count("num_samples", 1440), noise=1.2)
    held_out, answers = glyphs(384, noise=1.2)
    net = ResNet()
    session.built(net)
    optimizer = torch.optim.SGD(
        net.parameters(), lr=session.number("lr", 0.1), momentum=0.9, weight_decay=5e-4, nesterov=True
    )
    session.optimizer(optimizer)
    warm_up = session.number("warm_up", 30)

    def shape(step: int) -> float:
        if step < warm_up:
            return (step + 1) / (warm_up + 1)
        return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warm_up) / (session.num_steps - warm_up))))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, shape)
    session.schedule(scheduler)
    criterion = nn.CrossEntropyLoss(label_smoothing=session.number("label_smoothing", 0.1))
    monitor = session.watch(net, optimizer)
    loss_of_epoch = 0.0
    while not session.is_over():
        net.train()
        batches = session.order(torch.randperm(len(labels)), labels).split(session.count("batch_size", 24))
        for rows in batches:
            x, y = session.batch(session.pipeline(images[rows]), labels[rows])
            logits = net(x)
            loss = session.loss(criterion(logits, y))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            monitor.step(loss)
            if session.is_over():
                break
        with evaluating(net):
            loss_of_epoch = nn.functional.cross_entropy(net(session.pipeline(held_out)), answers).item()
        monitor.end_epoch(val_loss=loss_of_epoch)
    return loss_of_epoch
