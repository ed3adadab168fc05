"""The learning rate of every parameter group, as the optimizer used it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from forewarn.measure.probe import Array, Pending, Probe, Reading
from forewarn.measure.step import Step
from forewarn.types import peak_lr


class LearningRateProbe(Probe):
    """`train/lr`, read when the optimizer steps: by `monitor.step` a scheduler may have changed it.

    With a plan, it also records `train/lr_plan`, the planned rate; only steps with an optimizer step count.
    """

    name = "lr"

    def __init__(self, optimizers: Sequence[Optimizer], planned_share: Callable[[int, int], float]) -> None:
        self._optimizers = tuple(optimizers)
        self._planned_share = planned_share
        self._used: dict[int, list[Tensor | float]] = {}
        self._steps = 0
        self._scopes: tuple[str, ...] = ()
        self._peaks = [peak_lr(group) for optimizer in self._optimizers for group in optimizer.param_groups]

    def before_update(self, index: int, optimizer: Optimizer, step: Step, closure: bool) -> None:
        self._used[index] = _rates(optimizer)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self._steps, "peaks": self._peaks}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._steps = int(state["steps"])
        if len(state["peaks"]) == len(self._peaks):  # otherwise the groups have changed
            self._peaks = [float(peak) for peak in state["peaks"]]

    def collect(self, step: Step) -> Pending:
        used, self._used = self._used, {}
        planned = [self._planned_share(self._steps, group) for group in range(len(self._peaks))]
        self._steps += bool(used)
        rates: list[Tensor | float] = []
        for index, optimizer in enumerate(self._optimizers):
            rates += used[index] if index in used else _rates(optimizer)
        if len(rates) != len(self._scopes):
            self._scopes = tuple(map(str, range(len(rates))))
        scopes = self._scopes
        on_device = {group: rate for group, rate in enumerate(rates) if isinstance(rate, Tensor)}

        def decode(arrays: Sequence[Array]) -> Iterator[Reading]:
            values = list(rates)
            for group, array in zip(on_device, arrays, strict=True):
                values[group] = float(array)
            yield Reading("train/lr", scopes, values)
            if len(planned) == len(scopes) and not any(map(math.isnan, planned)):
                meant = [share * peak for share, peak in zip(planned, self._peaks, strict=True)]
                yield Reading("train/lr_plan", scopes, meant)

        return Pending([tensor.reshape(()) for tensor in on_device.values()], decode)


def _rates(optimizer: Optimizer) -> list[Tensor | float]:
    """The lr of each group; a tensor is copied on its device, since schedulers change it in place."""
    return [
        rate.detach().clone() if isinstance(rate, Tensor) else math.nan if rate is None else float(rate)
        for rate in [group.get("lr") for group in optimizer.param_groups]
    ]
