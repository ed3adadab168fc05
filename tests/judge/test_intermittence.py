"""Experts that rest now and then are left alone; one that never works, or stops working, is named."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from forewarn.judge.intermittence import idle_too_long

EXPERTS = tuple(f"experts.{index}.weight" for index in range(8))


def test_a_tensor_that_never_rested_before_is_named_at_its_first_gap():
    idle = np.zeros((20, 3), bool)
    idle[-1, 1] = idle[:, 2] = True
    assert idle_too_long(idle, ("a", "b", "c")).tolist() == [False, True, True]
    assert not idle_too_long(np.zeros((0, 3), bool), ("a", "b", "c")).any()


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
def test_experts_that_rest_by_chance_are_hardly_ever_named(share):
    rng = np.random.default_rng(0)
    idle = rng.random((2000, len(EXPERTS))) < share
    named = [idle_too_long(idle[max(0, end - 64) : end], EXPERTS).any() for end in range(10, 2000)]
    assert np.mean(named) < 1e-3


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
def test_an_expert_that_dies_among_others_is_named_within_fifty_checks(share):
    rng = np.random.default_rng(0)
    idle = rng.random((114, len(EXPERTS))) < share
    idle[64:, 3] = True
    assert idle_too_long(idle[50:], EXPERTS).tolist() == [index == 3 for index in range(8)]


class Mixture(nn.Module):
    """Every row goes to one expert; `dead` ones get none. With `empty`, an idle expert runs on no rows at all."""

    def __init__(self, dead: int = -1, empty: bool = False) -> None:
        super().__init__()
        self.gate = nn.Linear(6, 6)
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(6))
        self.dead, self.empty = dead, empty

    def forward(self, x: Tensor) -> Tensor:
        logits = self.gate(x)
        if self.dead >= 0:
            logits = logits.index_fill(1, torch.tensor([self.dead]), -1e9)
        weights, chosen = logits.softmax(-1).max(-1)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero()[:, 0]
            if len(rows) or self.empty:
                y = y.index_add(0, rows, weights[rows, None] * expert(x[rows]))
        return x + y


@pytest.mark.parametrize("empty", [False, True], ids=["not called", "called without rows"])
@pytest.mark.parametrize("dead", [-1, 2], ids=["all alive", "one dead"])
def test_only_an_expert_without_any_gradient_is_named(dead, empty, watch):
    torch.manual_seed(1)
    model = Mixture(dead, empty)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    monitor = watch(model, optimizer)
    for _ in range(150):
        loss = (model(torch.randn(4, 6)) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss)
    named = {alert.identity for alert in monitor.alerts if alert.code in ("G108", "U101")}
    tensors = ("experts.2.weight", "experts.2.bias") if dead >= 0 else ()
    assert named == {("U101" if empty else "G108", scope) for scope in tensors}
