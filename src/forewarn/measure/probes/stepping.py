"""Whether the optimizers stepped, and whether a gradient scaler skipped the step."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from forewarn.measure.probe import ONE, Array, Pending, Probe, Reading
from forewarn.measure.step import Step

_FRAMES_SEARCHED = 24
"""Maximum stack frames between a scaler's `step` and our hook, including wrappers of the optimizer's `step`."""

_UPDATES_SEARCHED = 3
"""Number of first optimizer steps that are searched for an undeclared gradient scaler."""

_GRADIENTS_COMPARED = 4
"""Number of gradients per optimizer that are compared; a backward pass changes all of them."""

_RESTING_STEPS = 100
"""Number of steps that an optimizer may skip before it counts as idle: one of several may step less often."""


_ACTING_PASSES = 2
"""Minimum number of forward passes without gradients in a step that shows a policy at work. One may be for a teacher or
for pseudo-labels."""

_SCALER_CODE = {
    inspect.unwrap(method).__code__ for method in (torch.amp.GradScaler.step, torch.amp.GradScaler._maybe_opt_step)
}


class Stepping(NamedTuple):
    """Which optimizers stepped; known once the step's readings are decoded."""

    stepped: bool
    """Whether any of them moved the weights."""
    skipped: bool
    """Whether a scaler skipped the step."""
    resting: Sequence[int]
    """Indices of the optimizers that step less often and skipped this step."""
    idle: Sequence[int]
    """Indices of the optimizers that have not stepped for so long that they are not used, while others are."""


@dataclass(frozen=True, slots=True)
class FoundScaler:
    """An undeclared gradient scaler that steps the optimizer; known before the update."""

    scaler: Any


class SteppingProbe(Probe):
    """`update/optimizer_steps` per `monitor.step`; with a scaler also `update/skipped` and `train/loss_scale`.

    A GradScaler skips a step in two ways. It does not call a plain optimizer at all, and lowers the scale. It calls a
    fused one with `found_inf` set. Neither is confused with an optimizer that is never called.
    """

    name = "stepping"
    on_every_rank = True
    provides = (Stepping, FoundScaler)

    def __init__(self, optimizers: Sequence[Optimizer], scaler: Any) -> None:
        self._optimizers = tuple(optimizers)
        self._scaler = scaler
        self._steps = 0
        self._found: list[Tensor] = []
        self._idle = [1] * len(self._optimizers)
        """Per optimizer: calls of `monitor.step` since its last step, or since the start if it never stepped."""
        self._last_scale = float("nan") if scaler is None else float(scaler.get_scale())
        self._updates = 0
        self._gradients: dict[int, list[tuple[int, int]]] = {}
        """Per optimizer: its gradients when another one stepped in this step."""
        self._separate = False

    def before_update(self, index: int, optimizer: Optimizer, step: Step, closure: bool) -> None:
        if self._scaler is None and self._updates < _UPDATES_SEARCHED and (scaler := calling_scaler()) is not None:
            self._scaler, self._last_scale = scaler, float("nan")
            step.provide(FoundScaler(scaler))
        self._updates += 1
        self._steps += 1
        self._idle[index] = 0
        if step.measured and len(self._optimizers) > 1 and not closure:
            self._compare_gradients(index)
        if isinstance(overflow := getattr(optimizer, "found_inf", None), Tensor):
            self._found.append(overflow.detach().clone().reshape(()))

    def skips(self, flag: Tensor) -> None:
        """Take note of a step that is skipped where the flag is above zero, for a reason other than a scaler."""
        self._found.append(flag.detach().reshape(()))

    def _compare_gradients(self, index: int) -> None:
        """Find out whether a backward pass came between another optimizer's step and this one."""
        before = self._gradients.get(index)
        self._separate |= before is not None and before != _gradients_of(self._optimizers[index])
        for other, optimizer in enumerate(self._optimizers):
            if other != index:
                self._gradients.setdefault(other, _gradients_of(optimizer))

    def collect(self, step: Step) -> Pending:
        separate, self._separate, self._gradients = self._separate, False, {}
        steps, self._steps = self._steps, 0
        resting: list[int] = []
        unused: list[int] = []
        for index, idle in enumerate(self._idle):
            if steps and idle:
                (resting if idle <= _RESTING_STEPS else unused).append(index)
            self._idle[index] = idle + 1
        overflows, self._found = self._found, []
        if steps == 0:
            overflows += self._found_before_update()
        scale = None if self._scaler is None else self._scale()
        tensors = overflows if scale is None else [*overflows, scale]

        def decode(arrays: Sequence[Array]) -> list[Reading]:
            readings = []
            fell = False
            if scale is not None:
                current_scale = float(arrays[-1])
                fell, self._last_scale = current_scale < self._last_scale, current_scale
                readings.append(Reading("train/loss_scale", ONE, current_scale))
            overflow = bool(overflows) and any(float(array) > 0 for array in arrays[: len(overflows)])
            skipped = overflow or (steps == 0 and fell)
            step.provide(Stepping(steps > 0 and not skipped, skipped, resting, unused))
            readings.append(Reading("update/optimizer_steps", ONE, 0 if skipped else steps))
            acts = step.acted >= _ACTING_PASSES
            if step.measured and (acts or len(self._optimizers) > 1):
                readings.append(Reading("update/separate_losses", ONE, 1 if separate else 2 * acts))
            if scale is not None or overflows:
                readings.append(Reading("update/skipped", ONE, float(skipped)))
            return readings

        return Pending(tensors, decode)

    def _scale(self) -> Tensor | None:
        scale = getattr(self._scaler, "_scale", None)
        return scale.detach().clone().reshape(()) if isinstance(scale, Tensor) else None

    def _found_before_update(self) -> list[Tensor]:
        """The scaler's overflow flags that `scaler.update()` has not cleared yet."""
        states = getattr(self._scaler, "_per_optimizer_states", {})
        overflows: list[Tensor] = []
        for optimizer in self._optimizers:
            if id(optimizer) in states:
                overflows += states[id(optimizer)]["found_inf_per_device"].values()
        return [overflow.detach().clone().reshape(()) for overflow in overflows]

    def state_dict(self) -> dict[str, Any]:
        return {"last_scale": self._last_scale}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._last_scale = float(state["last_scale"])


def _gradients_of(optimizer: Optimizer) -> list[tuple[int, int]]:
    """What tells an optimizer's first gradients from others: a backward pass replaces them or changes their version."""
    parameters = itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups)
    gradients = (parameter.grad for parameter in itertools.islice(parameters, _GRADIENTS_COMPARED))
    return [(id(gradient), -1 if gradient is None else gradient._version) for gradient in gradients]


def calling_scaler() -> Any:
    """The torch GradScaler whose `step` is calling the optimizer; None if there is none."""
    frame = inspect.currentframe()
    for _ in range(_FRAMES_SEARCHED):
        frame = frame.f_back if frame is not None else None
        if frame is None:
            return None
        if frame.f_code not in _SCALER_CODE:  # reading the locals of other frames would keep their objects alive
            continue
        candidate = frame.f_locals.get("self")
        if isinstance(candidate, torch.amp.GradScaler) and isinstance(getattr(candidate, "_scale", None), Tensor):
            return candidate
    return None


def present_scale(scaler: Any, optimizer: Optimizer | None) -> Tensor | None:
    """The scale of this optimizer's gradients now; None once `scaler.unscale_` has been called."""
    scale = getattr(scaler, "_scale", None)
    if not isinstance(scale, Tensor):
        return None
    stage = getattr(scaler, "_per_optimizer_states", {}).get(id(optimizer), {}).get("stage")
    unscaled = stage is not None and getattr(stage, "name", "READY") != "READY"
    return None if unscaled else scale
