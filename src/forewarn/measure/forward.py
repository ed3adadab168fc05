"""Hooks inside a model that exist only during a measured forward pass in training mode."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from forewarn.measure.hooks import Hook
from forewarn.measure.module_hooks import ModuleHooks, first_forward_only
from forewarn.measure.module_tree import Tree
from forewarn.measure.nested import nested_tensors
from forewarn.measure.probe import GradientTap, ModuleTap, Probe

if TYPE_CHECKING:
    from forewarn.measure.loop import Loop


_Target = tuple[Probe, Callable[..., Iterable[GradientTap] | None]]
"""A probe and what it wants to be called with: a module's arguments, or its arguments and output."""


class ForwardPass:
    """One measured forward pass: every hook that a probe asked for stays registered until `end`.

    A hook costs 1.5 µs per call even when it does nothing, so hooks are registered for measured passes only and removed
    at their end. Activation checkpointing recomputes within the backward pass, after that end.
    """

    def __init__(self, loop: Loop, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._loop = loop
        self._probes = list(loop.probes)
        self._root = root
        self._given = (args, kwargs)
        self._hooks = ModuleHooks()
        self._is_open = True
        self._entered: dict[nn.Module, list[_Target]] = {}
        self._left: dict[nn.Module, list[_Target]] = {}
        _passing[id(root)] = loop.tree
        try:
            for probe in self._probes:
                loop.guard(probe, self._begin, probe)
        finally:
            _passing.clear()
        # The root's own hooks are already running, so no more can be added: it is told here and in `end`.
        if entering_root := self._entered.pop(root, None):
            first_forward_only(self._telling(entering_root))(root, args, kwargs)
        self._leaving_root = self._left.pop(root, None)
        for module, targets in self._entered.items():
            self._hooks.put_on(ModuleTap(module, entered=self._telling(targets)))
        for module, targets in self._left.items():
            self._hooks.put_on(ModuleTap(module, left=self._telling(targets)))

    def end(self, output: Any) -> None:
        """Remove every hook; `output` is None if the forward pass raised."""
        self._hooks.remove()
        if output is not None and self._leaving_root:
            first_forward_only(self._telling(self._leaving_root))(self._root, *self._given, output)
        self._is_open = False
        for probe in self._probes:
            self._loop.guard(probe, probe.forward_ended, output)
        self._given = ((), {})  # hooks that tensors keep must not hold what the model was given

    def _begin(self, probe: Probe) -> None:
        probe.forward_begins()
        for tap in probe.module_taps():
            if tap.entered is not None:
                self._entered.setdefault(tap.module, []).append((probe, tap.entered))
            if tap.left is not None:
                self._left.setdefault(tap.module, []).append((probe, tap.left))

    def _telling(self, targets: list[_Target]) -> Callable[..., None]:
        """What a module's hook calls: one for all probes that look at the module."""
        loop = self._loop

        def tell(*args: Any) -> None:
            if not self._is_open:
                return
            with loop.stopwatch:
                for probe, target in targets:
                    if loop.failures and probe not in loop.probes:
                        continue
                    try:
                        for tap in target(*args) or ():
                            tap.tensor.register_hook(Hook(guarded(loop, probe, tap.reached)))
                    except Exception as error:
                        loop.switch_off(probe, error)

        return tell


def guarded(loop: Loop, probe: Probe, target: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
    """A gradient hook for a probe that never raises into the backward pass."""

    def reached(gradient: Tensor) -> None:
        if probe in loop.probes:
            with loop.stopwatch:
                loop.guard(probe, target, gradient)

    return reached


_passing: dict[int, Tree] = {}
"""The tree of the model whose hooks are being registered, by the model's id: several probes ask for it."""


def hookable_modules(model: nn.Module) -> dict[str, nn.Module]:
    """`Tree.hookable` of a model; within `Probe.module_taps`, the model is walked only if it has changed."""
    return _tree(model).hookable


def any_compiled(model: nn.Module) -> bool:
    """`Tree.any_compiled` of a model, just as cheap."""
    return _tree(model).any_compiled


def _tree(model: nn.Module) -> Tree:
    return _passing.get(id(model)) or Tree(model)


def differentiable(output: Any) -> Iterator[Tensor]:
    """The tensors in a module's inputs or outputs that a backward pass goes through; parameters are not among them."""
    return (tensor for _, tensor in nested_tensors(output) if tensor.grad_fn is not None)
