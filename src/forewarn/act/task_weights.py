"""Automatic loss weights, used only if `balance=` asks for them.

Weights are tensors beside the losses: nothing here waits for the device. They are constants to autograd, so the
gradient of the weighted sum is the weighted sum of the gradients.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from forewarn.config import Balancing
from forewarn.measure.probes.tasks import relative_rates

WIDEST = 1e4
"""Weights stay between 1 / WIDEST and WIDEST; beyond that, a solved task would dominate forever."""

_LARGEST_FACTOR = 2.0
"""Largest factor by which one update may change a weight."""

Losses = Mapping[str, Tensor]


class Balancer(Protocol):
    """Provides the weights of a step, and learns from its losses for the next."""

    def weights(self, losses: Losses, declared: Mapping[str, float]) -> dict[str, Tensor]:
        """The weight of each task, starting from the declared ones."""

    def update(self, losses: Losses, first: Losses, norms: Tensor | None) -> None:
        """Learn from a step: its losses, the first loss of each task, the norms of the weighted gradients if known."""

    def state_dict(self) -> dict[str, float]: ...

    def load_state_dict(self, state: Mapping[str, float]) -> None: ...


class GradNorm:
    """Weights that give all tasks similar gradients on the shared layer, slower ones slightly larger.

    GradNorm (Chen et al. 2018): G is the norm of a task's weighted gradient and r its relative training rate. The
    target is `mean(G) · r^asymmetry`, and the weights add up to the number of tasks. The paper follows the gradient of
    |G − target| with a second optimizer. Here a weight moves the fraction `rate` of the way on a log scale. That has
    the same fixed point, needs no second learning rate, and keeps every weight above zero.
    """

    def __init__(self, settings: Balancing) -> None:
        self._settings = settings
        self._weights: dict[str, Tensor] = {}

    def weights(self, losses: Losses, declared: Mapping[str, float]) -> dict[str, Tensor]:
        for name, loss in losses.items():
            weight = self._weights.get(name)
            self._weights[name] = _beside(loss, declared[name]) if weight is None else weight.to(loss.device)
        present = _stacked({name: self._weights[name] for name in losses})
        return dict(zip(losses, (present * (len(losses) / present.sum())).unbind(), strict=True))

    def update(self, losses: Losses, first: Losses, norms: Tensor | None) -> None:
        if norms is None:
            return
        before = self.weights(losses, {})
        pull = norms.to(_stacked(before))
        rates = relative_rates(_stacked(losses), _stacked({name: first[name] for name in losses})).to(pull)
        target = pull.mean() * rates**self._settings.asymmetry
        factor = ((target / pull) ** self._settings.rate).clamp(1 / _LARGEST_FACTOR, _LARGEST_FACTOR)
        usable = pull.isfinite().all() & rates.isfinite().all() & (pull > 0)
        after = (_stacked(before) * factor.where(usable, 1.0).nan_to_num(nan=1.0)).clamp(1 / WIDEST, WIDEST)
        self._weights |= zip(losses, after.unbind(), strict=True)

    def state_dict(self) -> dict[str, float]:
        return {name: float(weight) for name, weight in self._weights.items()}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self._weights = {name: torch.tensor(float(weight)) for name, weight in state.items()}


class Uncertainty:
    """Weights by how uncertain each task still is, learned with the model.

    Kendall et al. (2018) also minimize `Σ exp(−s) · loss + s` over s, one s per task. The weight is exp(−s), which
    settles at 1 / loss. Each step moves s down its gradient `1 − exp(−s) · loss`, by `rate` at most.

    It suits losses with a noise floor: as a loss falls to zero, its weight grows just as fast, up to `WIDEST`. For a
    negative loss the objective has no minimum, so its weight does not change.

    Declared weights are scaled to add up to the number of tasks. Adam would remember the gradients of a first weight of
    1000 for a thousand steps, and barely move the parameters meanwhile.
    """

    def __init__(self, settings: Balancing) -> None:
        self._settings = settings
        self._s: dict[str, Tensor] = {}

    def weights(self, losses: Losses, declared: Mapping[str, float]) -> dict[str, Tensor]:
        for name, loss in losses.items():
            if name not in self._s:
                relative = declared[name] * len(declared) / sum(declared.values())
                self._s[name] = _beside(loss, -math.log(relative))
        return {name: torch.exp(-self._s[name].to(loss)) for name, loss in losses.items()}

    def update(self, losses: Losses, first: Losses, norms: Tensor | None) -> None:
        for name, loss in losses.items():
            s = self._s[name].to(loss)
            slope = (1 - torch.exp(-s) * loss).clamp(-1.0, 1.0).where(loss >= 0, 0.0)  # not for NaN either
            self._s[name] = (s - self._settings.rate * slope).clamp(-math.log(WIDEST), math.log(WIDEST))

    def state_dict(self) -> dict[str, float]:
        return {name: float(s) for name, s in self._s.items()}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self._s = {name: torch.tensor(float(s)) for name, s in state.items()}


BALANCERS: dict[str, Any] = {"gradnorm": GradNorm, "uncertainty": Uncertainty}


def _beside(loss: Tensor, value: float) -> Tensor:
    """A number on the device of a loss; created there, because a copy from the host would wait for the device."""
    return torch.full((), value, device=loss.device)


def _stacked(values: Losses) -> Tensor:
    device = next(iter(values.values())).device
    return torch.stack([value.detach().to(device).reshape(()).float() for value in values.values()])
