"""The learning rate that a sweep suggests, against rates that are known."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from forewarn.preflight_checks.range_test import _judged, check_rate, range_test, scale_rates
from forewarn.preflight_checks.result import RateCurve
from forewarn.preflight_checks.twin import Twin, ramp, twin_of
from tests.preflight_checks.setups import mlp

NOTHING = lambda: None  # noqa: E731


class Bowl(nn.Module):
    """A quadratic loss of known curvature: gradient descent diverges from 2 / curvature on."""

    def __init__(self, curvature: float) -> None:
        super().__init__()
        self.point, self.curvature = nn.Parameter(torch.full((4,), 3.0)), curvature

    def forward(self, batch: Any) -> torch.Tensor:
        return 0.5 * self.curvature * self.point.square().sum()


def swept(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int = 100) -> RateCurve:
    return range_test(twin_of(model, [optimizer]), lambda model, batch: model(batch), [None], num_steps, NOTHING)


@pytest.mark.parametrize("curvature", [0.01, 10.0, 100.0])
def test_the_limit_of_gradient_descent_is_two_over_the_curvature(curvature: float) -> None:
    model = Bowl(curvature)
    curve = swept(model, torch.optim.SGD(model.parameters(), 1e-3), num_steps=200)
    if 2 / curvature < 10:
        assert 1 < curve.limit * curvature / 2 < 10  # the rise takes a few steps to show
    else:  # beyond the end of the sweep
        assert math.isnan(curve.limit)
    assert curve.suggested < 2 / curvature


def test_a_loss_that_does_not_change_has_no_clear_rate() -> None:
    class Flat(Bowl):
        def forward(self, batch: Any) -> torch.Tensor:
            return 0 * self.point.sum() + 1.0

    model = Flat(1.0)
    curve = swept(model, torch.optim.SGD(model.parameters(), 0.1))
    assert math.isnan(curve.suggested)
    assert check_rate(curve, [1.0] * 10).detail == "no clear rate; yours is 0.1"


def test_a_loss_without_a_floor_has_no_clear_rate() -> None:
    class Bottomless(Bowl):
        def forward(self, batch: Any) -> torch.Tensor:
            return -self.point.square().sum()

    model = Bottomless(1.0)
    assert math.isnan(swept(model, torch.optim.SGD(model.parameters(), 0.1)).suggested)


def test_noise_between_steps_is_no_limit() -> None:
    """As of a diffusion model, whose loss depends most on the noise levels that it draws."""
    rates = np.geomspace(1e-7, 10.0, 100)
    for seed in range(50):
        noise = np.random.default_rng(seed).normal(0.0, 0.2, len(rates))
        curve = _judged(rates, 2.0 + noise + np.where(rates > 1.0, rates, 0.0), 1e-3)
        assert 0.3 < curve.limit < 5.0


def test_groups_keep_the_ratio_of_their_rates() -> None:
    model = mlp()
    groups = [{"params": model[0].parameters(), "lr": 0.01}, {"params": model[2:].parameters(), "lr": 0.2}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    twin = Twin(model, (optimizer,))
    for top in (1e-5, 3.0, 0.5):
        scale_rates(twin, top)
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([top / 20, top])


def test_a_warm_up_from_zero_is_climbed_to_its_peak() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.4)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 100))
    assert optimizer.param_groups[0]["lr"] == 0.0
    set_share = ramp(Twin(model, (optimizer,)))
    rates = []
    for share in (0.25, 1.0):
        set_share(share)
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([0.1, 0.4])


def test_a_rate_that_is_a_tensor_stays_one() -> None:
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), torch.tensor(0.1))
    scale_rates(Twin(model, (optimizer,)), 0.5)
    rate = optimizer.param_groups[0]["lr"]
    assert isinstance(rate, torch.Tensor)
    assert rate.item() == 0.5


def test_an_optimizer_with_more_than_its_groups_is_copied_whole() -> None:
    """Torch itself copies three attributes; LBFGS has more."""
    model = Bowl(1.0)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=1.0)
    twin = twin_of(model, [optimizer])
    twin.step(lambda model, batch: model(batch), None)
    assert twin.root.point.abs().max() < 1e-3
    assert torch.equal(model.point.detach(), torch.full((4,), 3.0))
