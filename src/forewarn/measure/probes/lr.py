"""The learning rate of every parameter group as the optimizer used it, and the other settings that remedies quote."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from operator import is_
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from forewarn.measure.probe import Array, Pending, Probe, Reading
from forewarn.measure.step import Step
from forewarn.types import peak_lr


class LearningRateProbe(Probe):
    """`train/lr`, read when the optimizer steps: by `monitor.step` a scheduler may have changed it.

    With a plan, it also records `train/lr_plan`, the planned rate; only steps with an optimizer step count.
    `train/weight_decay` and `train/beta2` are recorded at the first step and whenever they change.
    """

    name = "lr"

    def __init__(self, optimizers: Sequence[Optimizer], planned_share: Callable[[int, int], float]) -> None:
        self._optimizers = tuple(optimizers)
        self._planned_share = planned_share
        self._used: dict[int, list[Tensor | float]] = {}
        self._steps = 0
        self._scopes: tuple[str, ...] = ()
        self._recorded: dict[str, list[float | None]] = {}
        """The settings that change rarely, as recorded last."""
        self._present: list[Any] = []
        """The same as the optimizers held them then."""
        self._peaks = [peak_lr(group) for optimizer in self._optimizers for group in optimizer.param_groups]

    def before_update(self, index: int, optimizer: Optimizer, step: Step, closure: bool) -> None:
        self._used[index] = _rates(optimizer)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self._steps, "peaks": self._peaks, "recorded": self._recorded}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._steps = int(state["steps"])
        if len(state["peaks"]) == len(self._peaks):  # otherwise the groups have changed
            self._peaks = [float(peak) for peak in state["peaks"]]
        self._present = []
        self._recorded = {
            name: [None if value is None else float(value) for value in values]
            for name, values in state.get("recorded", {}).items()
        }

    def collect(self, step: Step) -> Pending:
        used, self._used = self._used, {}
        planned = []
        for group in range(len(self._peaks)):
            planned.append(self._planned_share(self._steps, group))
        self._steps += bool(used)
        rates: list[Tensor | float] = []
        for index, optimizer in enumerate(self._optimizers):
            rates += used[index] if index in used else _rates(optimizer)
        if len(rates) != len(self._scopes):
            self._scopes = tuple(map(str, range(len(rates))))
        scopes = self._scopes
        changed = self._changed()
        on_device: dict[int, Tensor] = {}
        for group, rate in enumerate(rates):
            if isinstance(rate, Tensor):
                on_device[group] = rate.reshape(())

        def decode(arrays: Sequence[Array]) -> list[Reading]:
            values = list(rates)
            for group, array in zip(on_device, arrays, strict=True):
                values[group] = float(array)
            readings = [Reading("train/lr", scopes, values)]
            for name, settings in changed.items():
                readings.append(
                    Reading(f"train/{name}", scopes, [math.nan if one is None else one for one in settings])
                )
            if len(planned) == len(scopes) and not any(map(math.isnan, planned)):
                meant = [share * peak for share, peak in zip(planned, self._peaks, strict=True)]
                readings.append(Reading("train/lr_plan", scopes, meant))
            return readings

        return Pending(list(on_device.values()), decode)

    def _changed(self) -> dict[str, list[float | None]]:
        """The weight decay and β2 of each group, if one differs from what was recorded last; None where it has none."""
        present: list[Any] = []
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                present += group.get("weight_decay"), group.get("betas")
        if len(present) == len(self._present) and all(map(is_, present, self._present)):
            return {}
        self._present = [] if list in map(type, present) else present  # a list can change and stay the same object
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        decays = [_number(group.get("weight_decay")) for group in groups]
        betas = [_number((*group.get("betas", ()), None, None)[1]) for group in groups]
        changed = {
            name: values
            for name, values in (("weight_decay", decays), ("beta2", betas))
            if any(value is not None for value in values) and values != self._recorded.get(name)
        }
        self._recorded |= changed
        return changed


def _number(setting: Any) -> float | None:
    return float(setting) if isinstance(setting, int | float) else None


def _rates(optimizer: Optimizer) -> list[Tensor | float]:
    """The lr of each group; a tensor is copied on its device, since schedulers change it in place."""
    rates: list[Tensor | float] = []
    for group in optimizer.param_groups:
        rate = group.get("lr")
        if isinstance(rate, Tensor):
            rates.append(rate.detach().clone())
        else:
            rates.append(math.nan if rate is None else float(rate))
    return rates
