"""Real training with metrics of the user's own, each of which shows what no other reading does."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import forewarn
from forewarn.lab.networks import MLP
from tests.real_runs import KINDS, WHEN, Breakable, healthy


def entropy_without_epsilon(run: Path) -> forewarn.Monitor:
    """Its own function takes the logarithm of a probability that has become zero."""
    it = Breakable(run, lr=3e-3)

    def entropy(logits: Tensor) -> Tensor:
        share = (10 * logits).softmax(-1)
        return -(share * share.log()).sum(-1)

    it.metrics = [forewarn.ActivationMetric("sharp_entropy", entropy, r"\[root")]
    return it.train(300)


class WithTemperature(nn.Module):
    """A classifier whose logits are scaled by a number that is learned with them, without a bound."""

    def __init__(self) -> None:
        super().__init__()
        self.body = MLP([16, 64, 64, 5])
        self.log_scale = nn.Parameter(torch.ones(()))

    def forward(self, features: Tensor) -> Tensor:
        logits: Tensor = self.body(features) * self.log_scale.exp()
        return logits


def temperature_that_nobody_bounds(run: Path) -> forewarn.Monitor:
    """The scale of the logits is to stay below 3.5, and the training likes it higher."""
    torch.manual_seed(0)
    it = Breakable(run, WithTemperature(), lr=3e-3)
    it.metrics = [forewarn.ParameterMetric("scale", torch.exp, "log_scale", healthy=(None, 3.5))]
    return it.train(300)


class IgnoresTheClock(nn.Module):
    """A classifier whose last feature is the time at which a sample was taken: for sorting, not for learning."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Identity()
        self.body = MLP([16, 64, 64, 5])

    def forward(self, features: Tensor) -> Tensor:
        logits: Tensor = self.body(self.features(features)[:, :-1])
        return logits


def samples_of_another_year(run: Path) -> forewarn.Monitor:
    torch.manual_seed(0)
    it = Breakable(run, IgnoresTheClock())
    generator = torch.Generator().manual_seed(1)

    def with_time(step: int, inputs: Tensor) -> Tensor:
        time = torch.rand(len(inputs), 1, generator=generator) + (0.0 if step < 2 * WHEN else 10.0)
        return torch.cat([inputs, time], dim=1)

    it.change_batch = with_time
    it.metrics = [forewarn.ActivationMetric("time", lambda x: x[:, -1], "features")]
    return it.train(3 * WHEN)


METRIC_FAULTS: dict[str, Callable[[Path], forewarn.Monitor]] = {
    "M101": entropy_without_epsilon,
    "M102": temperature_that_nobody_bounds,
    "M103": samples_of_another_year,
}


def kurtosis(x: Tensor) -> Tensor:
    centred = x.float() - x.float().mean()
    return centred.pow(4).mean() / centred.square().mean().square().clamp(min=1e-30)


EVERY_METRIC = [
    forewarn.ActivationMetric("kurtosis", kurtosis),
    forewarn.ActivationMetric("least", lambda x: x.min()),
    forewarn.ActivationMetric("std"),
    forewarn.ParameterMetric("abs_max"),
    forewarn.ParameterMetric("mean"),
    forewarn.GradientMetric("norm"),
    forewarn.GradientMetric("skew", lambda g: g.mean() / g.square().mean().sqrt().clamp(min=1e-30)),
    forewarn.GradientMetric("log_norm", lambda g: g.norm().clamp(min=math.exp(-40)).log()),
    forewarn.ParameterDifferenceMetric("norm"),
]
"""Of all kinds, smooth and noisy, of one sign and of both, with light and with heavy tails."""


def healthy_with_metrics(kind: str, seed: int, run: Path, steps: int = 400) -> forewarn.Monitor:
    assert kind in KINDS
    return healthy(kind, seed, run, steps, metrics=EVERY_METRIC)
