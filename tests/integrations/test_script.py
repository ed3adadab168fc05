"""What `forewarn run` finds in training loops of many shapes. Each loop computes its own norms and losses."""

from __future__ import annotations

import copy
import gc
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import forewarn
from forewarn.integrations.discovery import PATIENCE, Discovery, Losses, Rounds
from forewarn.integrations.script import Ending

STEPS = 12
Expected = list[tuple[float, float]]
"""Per step: the gradient norm before clipping, and the loss."""


def norm(*models: nn.Module) -> float:
    """The global gradient norm in float64."""
    gradients = [own.grad.double() for model in models for own in model.parameters() if own.grad is not None]
    return math.sqrt(sum(float((gradient**2).sum()) for gradient in gradients))


def network(width: int = 8, out: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, out))


def batch() -> tuple[Tensor, Tensor]:
    x = torch.randn(16, 4)
    return x, x.sum(1, keepdim=True)


class Watched:
    """Runs a loop as `forewarn run` would, in this process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.ending = Ending()

    def __call__(self, loop: Callable[[], Any]) -> Any:
        gc.collect()
        discovery = Discovery({"run": self.path, "every": 1, "views": []})
        discovery.install()
        try:
            torch.manual_seed(0)
            return loop()
        finally:
            self.ending = discovery.finish("completed")

    def series(self, name: str, run: int = 0) -> list[float]:
        with forewarn.open_run(self.ending.runs[run]) as stored:
            return stored.series(name).values.tolist()

    def scopes(self, name: str, run: int = 0) -> set[str]:
        with forewarn.open_run(self.ending.runs[run]) as stored:
            return set(stored.scopes(name))


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    before = nn.Module.__call__, torch.autograd.backward, torch.optim.Optimizer.__init__, torch.amp.GradScaler.step
    yield Watched(tmp_path / "run")
    after = nn.Module.__call__, torch.autograd.backward, torch.optim.Optimizer.__init__, torch.amp.GradScaler.step
    assert before == after, "torch is left as it was"


def in_a_function() -> Expected:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    expected = []
    for _ in range(STEPS):
        x, y = batch()
        loss = functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        expected.append((norm(model), loss.item()))
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return expected


def in_a_trainer_class() -> Expected:
    class Trainer:
        def __init__(self) -> None:
            self.net = network()
            self.opt = torch.optim.AdamW([{"params": self.net[0].parameters()}, {"params": self.net[2].parameters()}])
            self.schedule = torch.optim.lr_scheduler.StepLR(self.opt, 5)

        def validate(self) -> None:
            self.net.eval()
            with torch.no_grad():
                functional.mse_loss(self.net(batch()[0]), batch()[1])
            self.net.train()

        def fit(self) -> Expected:
            expected = []
            for step in range(STEPS):
                if step % 4 == 0:
                    self.validate()
                x, y = batch()
                loss = functional.l1_loss(self.net(x), y)
                loss.backward()
                expected.append((norm(self.net), loss.item()))
                self.opt.step()
                self.schedule.step()
                self.opt.zero_grad()
            return expected

    return Trainer().fit()


def accumulating() -> Expected:
    model, expected = network(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(STEPS):
        total = 0.0
        for _ in range(3):
            x, y = batch()
            loss = functional.mse_loss(model(x), y) / 3
            loss.backward()
            total += loss.item()
        expected.append((norm(model), total))
        optimizer.step()
        optimizer.zero_grad()
    return expected


def with_a_gradient_scaler() -> Expected:
    model, expected = network(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for _ in range(STEPS):
        x, y = batch()
        with torch.autocast("cpu", torch.bfloat16):
            prediction = model(x)
        loss = functional.mse_loss(prediction.float(), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        expected.append((norm(model), loss.item()))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return expected


def with_a_target_network() -> Expected:
    """One container holds the trained network, a copy that follows it, and a frozen teacher."""

    class Agent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.online = network()
            self.target = copy.deepcopy(self.online)
            self.teacher = network().requires_grad_(False)

    agent, expected = Agent(), []
    optimizer = torch.optim.SGD(agent.online.parameters(), lr=0.05)
    for _ in range(STEPS):
        x, y = batch()
        with torch.no_grad():
            wanted = y + 0.1 * agent.target(x) + 0.1 * agent.teacher(x)
        loss = functional.mse_loss(agent.online(x), wanted)
        optimizer.zero_grad()
        loss.backward()
        expected.append((norm(agent.online), loss.item()))
        optimizer.step()
        for follower, own in zip(agent.target.parameters(), agent.online.parameters(), strict=True):
            follower.data.lerp_(own.data, 0.1)
    return expected


def with_two_optimizers() -> Expected:
    model, expected = network(), []
    body = torch.optim.SGD(model[0].parameters(), lr=0.05)
    head = torch.optim.Adam(model[2].parameters())
    for _ in range(STEPS):
        x, y = batch()
        loss = functional.mse_loss(model(x), y)
        loss.backward()
        expected.append((norm(model), loss.item()))
        for optimizer in (body, head):
            optimizer.step()
            optimizer.zero_grad()
    return expected


def with_an_attack_on_the_inputs() -> Expected:
    """The gradients of the attack are thrown away, and so is its loss."""
    model, expected = network(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(STEPS):
        x, y = batch()
        x.requires_grad_(True)
        functional.mse_loss(model(x), y).backward()
        worse = (x + 0.01 * x.grad.sign()).detach()
        optimizer.zero_grad()
        loss = functional.mse_loss(model(worse), y)
        loss.backward()
        expected.append((norm(model), loss.item()))
        optimizer.step()
    return expected


def with_optimizers_that_are_never_used() -> Expected:
    others = [network(), network()]
    unused = [torch.optim.Adam(other.parameters()) for other in others]
    expected = in_a_function()
    assert unused
    return expected


@pytest.mark.parametrize(
    "loop",
    [in_a_function, in_a_trainer_class, accumulating, with_a_gradient_scaler, with_a_target_network,
     with_two_optimizers, with_an_attack_on_the_inputs, with_optimizers_that_are_never_used],
)  # fmt: skip
def test_norm_and_loss_are_found_in(loop: Callable[[], Expected], watched: Watched) -> None:
    expected = watched(loop)
    assert not watched.ending.remarks
    assert len(watched.ending.runs) == 1
    norms, losses = zip(*expected, strict=True)
    assert watched.series("gradient/global_norm") == pytest.approx(norms, rel=1e-5)
    assert watched.series("train/loss") == pytest.approx(losses, rel=1e-5)
