"""The learning rate of every parameter group, as the optimizer used it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from forewarn.measure.probe import Array, Pending, Probe, Reading
from forewarn.measure.step import Step


class LearningRateProbe(Probe):
    """`train/lr`, read when the optimizer steps: by `monitor.step` a scheduler may have moved it on.

    With a plan also `train/lr_plan`, what the rate should be; steps are those in which an optimizer stepped.
    """

    name = "lr"

    def __init__(self, optimizers: Sequence[Optimizer], planned_share: Callable[[int, int], float]) -> None:
        self._optimizers = tuple(optimizers)
        self._planned_share = planned_share
        self._used: dict[int, list[Tensor | float]] = {}
        self._steps = 0
        self._scopes: tuple[str, ...] = ()
        self._peaks = [_peak(group) for each in self._optimizers for group in each.param_groups]

    def before_update(self, at: int, optimizer: Optimizer, step: Step, closure: bool) -> None:
        self._used[at] = _rates(optimizer)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self._steps, "peaks": self._peaks}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._steps = int(state["steps"])
        if len(state["peaks"]) == len(self._peaks):  # else the groups are others now
            self._peaks = [float(each) for each in state["peaks"]]

    def collect(self, step: Step) -> Pending:
        used, self._used = self._used, {}
        planned = [self._planned_share(self._steps, group) for group in range(len(self._peaks))]
        self._steps += bool(used)
        rates: list[Tensor | float] = []
        for at, each in enumerate(self._optimizers):
            rates += used[at] if at in used else _rates(each)
        if len(rates) != len(self._scopes):
            self._scopes = tuple(map(str, range(len(rates))))
        scopes = self._scopes
        on_device = {at: rate for at, rate in enumerate(rates) if isinstance(rate, Tensor)}

        def decode(arrays: Sequence[Array]) -> Iterator[Reading]:
            values = list(rates)
            for at, array in zip(on_device, arrays, strict=True):
                values[at] = float(array)
            yield Reading("train/lr", scopes, values)
            if len(planned) == len(scopes) and not any(map(math.isnan, planned)):
                meant = [share * peak for share, peak in zip(planned, self._peaks, strict=True)]
                yield Reading("train/lr_plan", scopes, meant)

        return Pending([tensor.reshape(()) for tensor in on_device.values()], decode)


def _peak(group: dict[str, Any]) -> float:
    """How high the lr of a group goes: what its scheduler has noted, else what it is now."""
    named = [float(group[name]) for name in ("initial_lr", "max_lr") if name in group]
    return max(named) if named else float(group.get("lr", math.nan))


def _rates(optimizer: Optimizer) -> list[Tensor | float]:
    """The lr of each group; one that is a tensor is copied where it is, for schedulers change it in place."""
    return [
        rate.detach().clone() if isinstance(rate, Tensor) else math.nan if rate is None else float(rate)
        for rate in [group.get("lr") for group in optimizer.param_groups]
    ]
