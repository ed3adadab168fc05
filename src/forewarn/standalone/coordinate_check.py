"""The refined coordinate check (Haas et al. 2025, arXiv 2505.22491): why an activation changed.

After t updates, a layer's output is W_t x_t instead of W_0 x_0. The difference has two parts: (W_t−W_0) x_t comes from
the layer's own updates, and W_0 (x_t−x_0) from the layers before it.
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
from torch.utils._pytree import tree_map_only

from forewarn.measure.module_hooks import ModuleHooks
from forewarn.measure.module_outputs import ROOT, NamedModules
from forewarn.measure.probe import ModuleTap
from forewarn.measure.references import Reference, random_numbers_kept
from forewarn.standalone.module_monitor import ModuleMonitor


def l2_norm(tensor: Tensor) -> Tensor:
    """The norm of each vector along the last dimension, in float32 at least."""
    precise = torch.promote_types(tensor.dtype, torch.float32)
    norms: Tensor = torch.linalg.vector_norm(tensor, dim=-1, dtype=precise)
    return norms


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
        return _Call(*tree_map_only(Tensor, change, (self.args, self.kwargs, self.output)))


class RefinedCoordinateCheck:
    """Splits the change of every module's output since the reference into the module's own part and what it passes on.

    On a monitored step, run the reference and the monitored module on the same input, in either order. The reference
    may run within `monitor.no_monitor()`. Then call `refined_coordinate_check()`. Each module is measured as soon as
    both have run it. With the reference first, no activation of the monitored module is kept, and those of the
    reference are released one by one. `modules` is matched from the start of module names.

    The reference computes W_0 x_t for each module separately. That costs about one more forward of the model for its
    layers, and one for each level of modules that contain them.
    """

    def __init__(self, monitor: ModuleMonitor, modules: str = ".*") -> None:
        self._monitor = monitor
        model, reference = self._models()
        self._reference = monitor.reference_module
        pattern = re.compile(modules)
        self._names = [name for name, _ in model.heard if pattern.match(name) and name != ROOT]
        """Without the root, for which difference metrics say the same."""
        if not self._names:
            raise ValueError(f"modules={modules!r} matches none of the monitored modules inside the model")
        self._sides: tuple[dict[str, nn.Module], ...] = (dict(model.heard), dict(reference.modules.heard))
        self._waiting: dict[str, deque[tuple[bool, _Call]]] = defaultdict(deque)
        """Per module, the forwards without a counterpart yet: whether it is the reference's, and the call."""
        self._clone = _Clones(offload=monitor.cpu_offload)
        self._measured: list[tuple[str, Tensor]] = []
        self._failed: set[str] = set()
        self._step = monitor.current_step
        self._is_measuring = False
        self._hooks = ModuleHooks(monitor.hook_failed, traced=True)
        for is_reference, side in enumerate(self._sides):
            for name in self._names:
                self._hooks.put_on(ModuleTap(side[name], left=self._listener(name, bool(is_reference))))
        reference.companions.append(self.close)

    def refined_coordinate_check(self) -> None:
        """Log what was measured since the last call; does nothing on a step that is not monitored.

        Keys: `RCC (W_t-W_0)x_t/{module}/l2norm`, `RCC W_0(x_t-x_0)/…`, `RCC x_t/…` and `RCC (x_t-x_0)/…`. The first two
        are also logged for `{module}.weight` of Linear and LayerNorm, without the bias. An Embedding has only the
        first.
        """
        if not self._monitor.is_monitoring():
            return
        self._models()
        if self._monitor.reference_module is not self._reference:
            raise ValueError("the monitor's reference module has changed: create a new RefinedCoordinateCheck")
        self._start_if_new_step()
        if not self._measured and not self._failed.issuperset(self._names):
            sides = {is_reference for calls in self._waiting.values() for is_reference, _ in calls}
            absent = "reference" if sides == {False} else "monitored"
            raise ValueError(f"No inputs found for the {absent} module. Run both modules on the same input first")
        for key, norms in self._measured:
            self._monitor.log_tensor(key, norms)
        self._release()

    def close(self) -> None:
        """Remove the hooks and release all tensors; safe to call twice."""
        self._hooks.remove()
        self._release()

    def _models(self) -> tuple[NamedModules, Reference]:
        """The monitor's module and reference."""
        if self._monitor.modules is None:
            raise ValueError("Set the module to monitor before the coordinate check: monitor.set_module(model)")
        if self._monitor.reference is None:
            raise ValueError(
                "Set the reference module before the coordinate check: monitor.set_reference_module(model)"
            )
        return self._monitor.modules, self._monitor.reference

    def _listener(self, name: str, is_reference: bool) -> Callable[..., None]:
        def returned(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            if self._is_measuring or name in self._failed or not self._monitor.is_monitoring(is_reference):
                return
            if isinstance(output, Tensor) and output.is_floating_point():
                self._take(name, is_reference, _Call(args, kwargs, output))

        return returned

    def _take(self, name: str, is_reference: bool, call: _Call) -> None:
        """Measure a module if its counterpart has run, else keep this call."""
        self._start_if_new_step()
        waiting = self._waiting[name]
        if not waiting or waiting[0][0] == is_reference:
            waiting.append((is_reference, call.mapped(self._clone)))
            return
        partner = waiting.popleft()[1].mapped(lambda tensor: tensor.to(call.output.device))
        now, first = (partner, call) if is_reference else (call, partner)
        module, reference = (side[name] for side in self._sides)
        self._is_measuring = True
        try:
            with torch.no_grad(), self._monitor.ignoring_reference():
                again = _forward(reference, now)
                self._measured += [
                    (f"RCC {key}/l2norm", l2_norm(term))
                    for key, term in _terms(name, module, reference, now, first, again)
                ]
        except Exception as error:  # a module that fails on another's input must not end training
            self._failed.add(name)
            self._monitor.logger.warning("coordinate check: %s failed and is left out: %s", name, error)
        finally:
            self._is_measuring = False

    def _start_if_new_step(self) -> None:
        if self._step != self._monitor.current_step:
            self._step = self._monitor.current_step
            self._release()

    def _release(self) -> None:
        self._waiting.clear()
        self._measured.clear()
        self._clone.forget()


def _terms(
    name: str, module: nn.Module, reference: nn.Module, now: _Call, first: _Call, again: Tensor
) -> Iterator[tuple[str, Tensor]]:
    """The terms logged for one module; `again` is the reference's output for the module's input: W_0 x_t."""
    yield f"(W_t-W_0)x_t/{name}", now.output - again
    if isinstance(module, nn.Embedding):
        return
    yield f"W_0(x_t-x_0)/{name}", again - first.output
    if now.input is not None:
        yield f"x_t/{name}", now.input
    if now.input is not None and first.input is not None:
        yield f"(x_t-x_0)/{name}", now.input - first.input
    if isinstance(module, nn.Linear | nn.LayerNorm) and isinstance(reference, nn.Linear | nn.LayerNorm):
        wt_xt = now.output if module.bias is None else now.output - module.bias
        w0_xt = again if reference.bias is None else again - reference.bias
        w0_x0 = first.output if reference.bias is None else first.output - reference.bias
        yield f"(W_t-W_0)x_t/{name}.weight", wt_xt - w0_xt
        yield f"W_0(x_t-x_0)/{name}.weight", w0_xt - w0_x0
        yield f"(W_t-W_0)x_t/{name}.weight/W_t x_t", wt_xt
        yield f"W_0(x_t-x_0)/{name}.weight/W_0 x_0", w0_x0
    if isinstance(module, nn.LayerNorm) and now.input is not None and first.input is not None:
        # The normalized input, which the weight multiplies.
        x_t, x_0 = (functional.layer_norm(x, module.normalized_shape, eps=module.eps) for x in (now.input, first.input))
        yield f"(W_t-W_0)x_t/{name}.weight/x_t", x_t
        yield f"W_0(x_t-x_0)/{name}.weight/x_t-x_0", x_t - x_0


def _forward(reference: nn.Module, now: _Call) -> Tensor:
    """The output of a reference module for another input; random numbers, buffers and inputs stay unchanged."""
    call = now.mapped(lambda tensor: tensor.detach().clone())
    buffers = [(buffer, buffer.clone()) for buffer in reference.buffers()] if reference.training else []
    with random_numbers_kept([now.output]):
        output = reference(*call.args, **call.kwargs)
    for buffer, before in buffers:
        buffer.copy_(before)
    if not isinstance(output, Tensor):
        raise TypeError(f"its reference returned {type(output).__name__}, not a tensor")
    return output


class _Clones:
    """One clone per tensor, since the output of one module is the input of the next.

    A clone lives as long as someone else holds it. A tensor changed in place since then is cloned again.
    """

    def __init__(self, offload: bool) -> None:
        self._offload = offload
        self._clones: dict[int, tuple[weakref.ref[Tensor], int, weakref.ref[Tensor]]] = {}

    def __call__(self, tensor: Tensor) -> Tensor:
        version = 0 if tensor.is_inference() else tensor._version
        if id(tensor) in self._clones:
            original, old_version, reference = self._clones[id(tensor)]
            clone = reference()
            if original() is tensor and old_version == version and clone is not None:
                return clone
        new = tensor.detach().to("cpu", copy=True) if self._offload else tensor.detach().clone()
        self._clones[id(tensor)] = (weakref.ref(tensor), version, weakref.ref(new))
        return new

    def forget(self) -> None:
        self._clones.clear()
