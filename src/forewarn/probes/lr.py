"""The learning rate of every parameter group, as the optimizer used it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from forewarn.probes.probe import Array, Pending, Probe, Reading


class LearningRateProbe(Probe):
    """`train/lr`, read when the optimizer steps: by `monitor.step` a scheduler may have moved it on."""

    name = "lr"

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = tuple(optimizers)
        self._used: dict[int, list[Tensor | float]] = {}

    def before_update(self, at: int, optimizer: Optimizer, measured: bool, closure: bool) -> None:
        self._used[at] = _rates(optimizer)

    def collect(self, measured: bool) -> Pending:
        used, self._used = self._used, {}
        rates = [
            rate for at, each in enumerate(self._optimizers) for rate in (used[at] if at in used else _rates(each))
        ]
        scopes = tuple(map(str, range(len(rates))))
        on_device = {at: rate for at, rate in enumerate(rates) if isinstance(rate, Tensor)}

        def decode(arrays: Sequence[Array]) -> Iterator[Reading]:
            values = list(rates)
            for at, array in zip(on_device, arrays, strict=True):
                values[at] = float(array)
            yield Reading("train/lr", scopes, values)

        return Pending([tensor.reshape(()) for tensor in on_device.values()], decode)


def _rates(optimizer: Optimizer) -> list[Tensor | float]:
    """The lr of each group; one that is a tensor is copied where it is, for schedulers change it in place."""
    rates = (group.get("lr") for group in optimizer.param_groups)
    return [
        rate.detach().clone() if isinstance(rate, torch.Tensor) else math.nan if rate is None else float(rate)
        for rate in rates
    ]
