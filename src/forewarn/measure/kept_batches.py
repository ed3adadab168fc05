"""The batches of the last steps, for snapshots: what the loop passed to the model, and the random states then."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from forewarn.measure.hooks import Hooks
from forewarn.measure.module_tree import clean_name, named_modules, named_parameters, unwrapped
from forewarn.measure.packed import Packed, pack
from forewarn.random_states import random_state

_MOST_CALLS = 64
"""Maximum number of forward passes kept per step, as in gradient accumulation; the first ones are kept."""


@dataclass(slots=True)
class Call:
    """One forward pass in training mode."""

    module: nn.Module
    """What the loop called: the model, or a part of it."""
    arguments: Packed
    """`(args, kwargs)`."""
    random: dict[str, Any] | None
    """The random states before it."""
    autocast: str | None
    """The type that torch.autocast computes in, such as `float16`."""


@dataclass(slots=True)
class KeptStep:
    """What one step was given."""

    step: int = -1
    """-1 until the step has ended."""
    calls: list[Call] = field(default_factory=list)
    num_missing: int = 0
    """Number of further forward passes."""
    given: Packed | None = None
    """`(inputs, targets)` of `monitor.batch`."""
    weights: dict[str, Tensor] | None = None
    """The parameters before the update."""

    @property
    def is_changed(self) -> bool:
        """Whether a kept tensor was changed in place since."""
        packed = [call.arguments for call in self.calls] + ([] if self.given is None else [self.given])
        return any(one.changed for one in packed)


class KeptBatches:
    """Keeps the last steps. It refers to the tensors of the loop; if one is changed in place, it copies from then on.

    On an accelerator, and with several ranks, a step is judged one step late, so one more step is kept.
    """

    def __init__(
        self, model: nn.Module, optimizers: Sequence[Optimizer], num_steps: int, *, keep_weights: bool, is_late: bool
    ) -> None:
        self._model = model
        self._optimizers = optimizers
        self._keep_weights = keep_weights
        self._steps: deque[KeptStep] = deque()
        self._num_steps = num_steps
        self._is_late = is_late
        self._open = KeptStep()
        self._copies = False
        self._hooks = Hooks()

    def attach(self, failed: Callable[[Exception], None]) -> None:
        """Look at the weights before each update, if they are kept."""
        self._hooks = Hooks(failed, traced=True)
        for optimizer in self._optimizers if self._keep_weights else ():
            self._hooks.put(optimizer, "register_step_pre_hook", self._update_begins)

    def remove(self) -> None:
        """Remove the hooks."""
        self._hooks.remove()

    def release(self) -> None:
        """Let go of the batches."""
        self._steps.clear()
        self._open = KeptStep()

    def take(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep the arguments of a forward pass that begins."""
        self._make_room()
        if len(self._open.calls) == _MOST_CALLS:
            self._open.num_missing += 1
            return
        arguments = pack((args, kwargs), self._copies)
        kind = arguments.tensors[0].device.type if arguments.tensors else "cpu"
        in_autocast = torch.is_autocast_enabled(kind)
        autocast = str(torch.get_autocast_dtype(kind)).removeprefix("torch.") if in_autocast else None
        self._open.calls.append(Call(module, arguments, _random_state(), autocast))

    def give(self, inputs: Any, targets: Any) -> None:
        """Keep what `monitor.batch` was given."""
        self._make_room()
        self._open.given = pack((inputs, targets), self._copies)

    def end_step(self, step: int) -> None:
        """The current step ends and is number `step`."""
        self._open.step = step
        if not self._copies and self._open.is_changed:
            self._copies = True
        self._steps.append(self._open)
        self._open = KeptStep()

    def _make_room(self) -> None:
        """Let go of the oldest step when another begins."""
        while len(self._steps) >= self._num_steps + self._is_late:
            self._steps.popleft()

    def steps(self, last: int) -> list[KeptStep]:
        """The kept steps up to `last`, oldest first; the step that has not ended if that is its number."""
        ended = [kept for kept in self._steps if kept.step <= last]
        if self.is_open and (not self._steps or last > self._steps[-1].step):
            self._open.step = last
            ended.append(self._open)
        return ended

    @property
    def is_open(self) -> bool:
        """Whether the current step has begun."""
        return bool(self._open.calls or self._open.given)

    def name_of(self, module: nn.Module) -> str:
        """The name of a module in the model; empty for the model itself."""
        own = unwrapped(module)
        names = (clean_name(f"{name}.").removesuffix(".") for name, one in named_modules(self._root()) if one is own)
        return next(names, "")

    def _root(self) -> nn.Module:
        return unwrapped(self._model)

    def _update_begins(self, *_: Any) -> None:
        if self._open.weights is None:  # of several optimizers, the first to step
            for kept in islice(reversed(self._steps), self._is_late, None):
                kept.weights = None
            self._open.weights = {
                clean_name(name): parameter.detach().clone() for name, parameter in named_parameters(self._root())
            }


def _random_state() -> dict[str, Any] | None:
    try:
        return random_state()
    except RuntimeError:  # while a CUDA graph is captured
        return None
