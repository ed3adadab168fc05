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
        self._leaving_root: list[Callable[..., None]] = []
        """Called with the root's output: its own hooks are already running, so no more can be added."""
        self._is_open = True
        _passing[id(root)] = loop.tree
        try:
            for probe in self._probes:
                loop.guard(probe, self._begin, probe)
        finally:
            _passing.clear()

    def end(self, output: Any) -> None:
        """Remove every hook; `output` is None if the forward pass raised."""
        self._hooks.remove()
        if output is not None:
            for hook in self._leaving_root:
                hook(self._root, *self._given, output)
        self._is_open = False
        for probe in self._probes:
            self._loop.guard(probe, probe.forward_ended, output)
        self._given, self._leaving_root = ((), {}), []  # hooks that tensors keep must not hold what the model was given

    def _begin(self, probe: Probe) -> None:
        probe.forward_begins()
        for tap in probe.module_taps():
            self._put(probe, tap)

    def _put(self, probe: Probe, tap: ModuleTap) -> None:
        entered = None if tap.entered is None else self._passing_on(probe, tap.entered)
        left = None if tap.left is None else self._passing_on(probe, tap.left)
        if tap.module is not self._root:
            self._hooks.put_on(ModuleTap(tap.module, entered, left))
            return
        if entered is not None:
            first_forward_only(entered)(self._root, *self._given)
        if left is not None:
            self._leaving_root.append(first_forward_only(left))

    def _passing_on(self, probe: Probe, target: Callable[..., Iterable[GradientTap] | None]) -> Callable[..., None]:
        def follow(*args: Any) -> None:
            for tap in target(*args) or ():
                tap.tensor.register_hook(Hook(guarded(self._loop, probe, tap.reached)))

        def seen(*args: Any) -> None:
            if self._is_open and probe in self._loop.probes:
                with self._loop.stopwatch:
                    self._loop.guard(probe, follow, *args)

        return seen


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
