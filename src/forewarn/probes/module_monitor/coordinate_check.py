"""The refined coordinate check (Haas et al. 2025, arXiv 2505.22491): whose doing the change of an activation is.

After t updates a layer gives W_t x_t where it gave W_0 x_0 at first. The difference has two parts: (W_t−W_0) x_t, which
the layer's own updates make, and W_0 (x_t−x_0), which it passes on from the layers before it.
"""

from __future__ import annotations

import re
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from forewarn.probes.hooks import Hook
from forewarn.probes.module_monitor.hooks import ROOT
from forewarn.probes.module_monitor.monitor import ModuleMonitor


def l2_norm(tensor: Tensor) -> Tensor:
    """The norm of each vector along the last dimension, in float32 at least."""
    return torch.linalg.vector_norm(tensor.to(torch.promote_types(tensor.dtype, torch.float32)), dim=-1)


@dataclass(frozen=True, slots=True)
class _Call:
    """One forward of one module."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Tensor

    @property
    def input(self) -> Tensor | None:
        """What counts as x: the first argument, if it is a tensor of real numbers."""
        first = self.args[0] if self.args else next(iter(self.kwargs.values()), None)
        return first if isinstance(first, Tensor) and first.is_floating_point() else None

    def mapped(self, change: Callable[[Tensor], Tensor]) -> _Call:
        def changed(value: Any) -> Any:
            return change(value) if isinstance(value, Tensor) else value

        kwargs = {name: changed(each) for name, each in self.kwargs.items()}
        return _Call(tuple(map(changed, self.args)), kwargs, change(self.output))


class RefinedCoordinateCheck:
    """Splits the change of every module's output since the reference into the module's own part and what it passes on.

    On a monitored step, run the reference and the monitored module on the same input, in either order, the reference
    within `monitor.no_monitor()` or not; then call `refined_coordinate_check()`. Each module is measured as soon as both
    have run it: with the reference first, no activation of the monitored module is ever kept, and those of the reference
    are released one by one. `modules` is matched from the start of the module names.

    The reference computes W_0 x_t for each module by itself: about one more forward of the model for its layers, and
    one for each level of modules that contain them.
    """

    def __init__(self, monitor: ModuleMonitor, modules: str = ".*") -> None:
        self._monitor = monitor
        model, reference = self._models()
        self._references = dict(reference.heard)
        self._waiting: dict[str, deque[tuple[bool, _Call]]] = defaultdict(deque)
        """Per module, forwards of one side that the other has not made yet: whether it is the reference's, and which."""
        self._kept = _Clones(offload=monitor.cpu_offload)
        self._found: list[tuple[str, Tensor]] = []
        self._step = monitor.current_step
        self._is_measuring = False
        wanted = re.compile(modules)
        self._handles = [
            module.register_forward_hook(Hook(self._listener(name, is_reference), traced=True), with_kwargs=True)
            for heard, is_reference in ((model.heard, False), (reference.heard, True))
            for name, module in heard
            if wanted.match(name) and name != ROOT  # of the root, the difference metrics say the same
        ]

    def refined_coordinate_check(self) -> None:
        """Log what was measured since the last call; nothing on a step that is not monitored.

        Keys: `RCC (W_t-W_0)x_t/{module}/l2norm`, `RCC W_0(x_t-x_0)/…`, `RCC x_t/…` and `RCC (x_t-x_0)/…`; the first two
        also for `{module}.weight` of Linear and LayerNorm, without the bias; of an Embedding only the first.
        """
        if not self._monitor.is_monitoring():
            return
        self._models()
        self._start_if_new_step()
        if not self._found:
            sides = {is_reference for calls in self._waiting.values() for is_reference, _ in calls}
            absent = "monitored" if sides != {False} else "reference"
            raise ValueError(f"the {absent} module has made no forward in this step: run both on the same input first")
        for key, norms in self._found:
            self._monitor.log_tensor(key, norms)
        self._release()

    def close(self) -> None:
        """Take the hooks back and release all that is kept; may be called twice."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._release()

    def _models(self) -> tuple[Any, Any]:
        """The modules of the monitor and those of its reference."""
        if self._monitor.modules is None:
            raise ValueError("the monitor has no module: call monitor.set_module(model) first")
        if self._monitor.references is None:
            raise ValueError("the monitor has no reference module: call monitor.set_reference_module(reference) first")
        return self._monitor.modules, self._monitor.references.modules

    def _listener(self, name: str, is_reference: bool) -> Callable[..., None]:
        def returned(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            if self._is_measuring or not self._monitor.is_monitoring(is_reference):
                return
            # What activation checkpointing computes again in the backward pass is not heard.
            if isinstance(output, Tensor) and torch._C._current_graph_task_id() == -1:
                self._take(name, module, is_reference, _Call(args, kwargs, output).mapped(Tensor.detach))

        return returned

    def _take(self, name: str, module: nn.Module, is_reference: bool, call: _Call) -> None:
        """Measure a module if the other side's forward is there, else keep this one."""
        self._start_if_new_step()
        waiting = self._waiting[name]
        if not waiting or waiting[0][0] == is_reference:
            waiting.append((is_reference, call.mapped(self._kept)))
            return
        other = waiting.popleft()[1].mapped(lambda tensor: tensor.to(call.output.device))
        now, first = (other, call) if is_reference else (call, other)
        reference = self._references[name]
        self._is_measuring = True
        try:
            with torch.no_grad():
                w0_xt = self._through(reference, now)
                self._found += [(f"RCC {key}/l2norm", l2_norm(each)) for key, each in terms(name, reference, module
                    if not is_reference else None, now, first, w0_xt)]
        finally:
            self._is_measuring = False
