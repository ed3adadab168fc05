"""The events of a training loop, seen through the hooks that torch offers, passed on to the probes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from forewarn.probes.hooks import Hook
from forewarn.probes.probe import Pending, Probe
from forewarn.probes.speed import Stopwatch

_log = logging.getLogger("forewarn")

_MAX_WATCHED_OUTPUTS = 16
"""Tensors of the model's output that a backward pass is recognised by."""


class Loop:
    """Watches one model and its optimizers, and keeps every failure of a probe away from the training."""

    def __init__(
        self, model: nn.Module, optimizers: Sequence[Optimizer], probes: Sequence[Probe], stopwatch: Stopwatch
    ) -> None:
        self.measured = False
        """Whether the step under way is measured in detail."""
        self.failures: dict[str, str] = {}
        """Probes that raised, with what they said; they are switched off."""
        self._probes = list(probes)
        self._stopwatch = stopwatch
        self._graph_task = -1
        self._handles = [model.register_forward_hook(Hook(self._forward_ended))]
        for at, optimizer in enumerate(optimizers):
            self._handles.append(optimizer.register_step_pre_hook(Hook(self._stepper("before_update", at))))
            self._handles.append(optimizer.register_step_post_hook(Hook(self._stepper("after_update", at))))

    def close(self) -> None:
        """Take every hook back."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def collect(self) -> list[tuple[Probe, Pending]]:
        """The readings of the step that ends now."""
        collected = []
        for probe in list(self._probes):
            pending = self.guard(probe, probe.collect, self.measured)
            if pending is not None:
                collected.append((probe, pending))
        return collected

    def guard(self, probe: Probe, call: Callable[..., Any], *args: Any) -> Any:
        """Call into a probe; what it raises switches it off."""
        try:
            return call(*args)
        except Exception as error:
            _log.exception("the probe %r failed and is switched off; training goes on", probe.name)
            self.failures[probe.name] = f"{type(error).__name__}: {error}"
            self._probes = [other for other in self._probes if other is not probe]
            return None

    def _tell(self, event: str, *args: Any) -> None:
        with self._stopwatch:
            for probe in self._probes:
                self.guard(probe, getattr(probe, event), *args)

    def _stepper(self, event: str, at: int) -> Callable[..., None]:
        def stepped(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given = args[1:] if args and args[0] is optimizer else args  # torch passes the optimizer itself as well
            closure = kwargs.get("closure", given[0] if given else None)
            self._tell(event, at, optimizer, self.measured, closure is not None)

        return stepped

    def _forward_ended(self, module: nn.Module, args: Any, output: Any) -> None:
        if not (module.training and torch.is_grad_enabled()):
            return
        for count, tensor in enumerate(_differentiable(output)):
            if count == _MAX_WATCHED_OUTPUTS:
                break
            tensor.register_hook(Hook(self._backward_reached))

    def _backward_reached(self, gradient: Tensor) -> None:
        task = torch._C._current_graph_task_id()
        if task == self._graph_task:
            return
        self._graph_task = task
        self._tell("backward_begins", self.measured)
        torch.autograd.Variable._execution_engine.queue_callback(self._backward_ended)

    def _backward_ended(self) -> None:
        self._tell("backward_ended", self.measured)


def _differentiable(output: Any, depth: int = 0) -> Iterator[Tensor]:
    """The tensors in a model's output through which a backward pass can come."""
    if isinstance(output, Tensor):
        if output.requires_grad:
            yield output
        return
    inside: Iterable[Any] = ()
    if isinstance(output, Mapping):
        inside = output.values()
    elif isinstance(output, list | tuple):
        inside = output
    elif hasattr(output, "__dataclass_fields__"):
        inside = (getattr(output, name) for name in output.__dataclass_fields__)
    if depth < 3:
        for one in inside:
            yield from _differentiable(one, depth + 1)
