"""Hooks inside a model that exist only during a measured forward pass in training mode."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn

from forewarn.measure.hidden_from_checkpointing import hidden_from_checkpointing
from forewarn.measure.hooks import Hook
from forewarn.measure.module_hooks import is_first_forward
from forewarn.measure.module_tree import Tree, named_modules
from forewarn.measure.nested import nested_tensors
from forewarn.measure.probe import GradientTap, Probe

if TYPE_CHECKING:
    from forewarn.measure.loop import Loop


_Target = tuple[Probe, Callable[..., Iterable[GradientTap] | None]]
"""A probe and its callback, which takes a module's arguments, or its arguments and output."""


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
        self._is_open = True
        self._entered: dict[int, _Tapped] = {}
        """By module id, since a module may define its own equality."""
        self._left: dict[int, _Tapped] = {}
        self._leaving_root: _Tapped | None = None
        self._part = None if root is loop.model else {id(module) for _, module in named_modules(root)}
        """The ids of the modules inside, if only a part of the model runs."""

    def begin(self) -> None:
        """Register the hooks."""
        loop, root = self._loop, self._root
        _passing[id(loop.model)] = loop.tree
        try:
            for probe in self._probes:
                loop.guard(probe, self._begin, probe)
        finally:
            _passing.clear()
        # The root's hooks are already running and it can take no more, so its probes are called here and in `end`.
        if entering_root := self._entered.pop(id(root), None):
            self._telling(entering_root.targets)(root, *self._given)
        self._leaving_root = self._left.pop(id(root), None)
        for tapped in self._entered.values():
            self._put(tapped, "register_forward_pre_hook")
        for tapped in self._left.values():
            self._put(tapped, "register_forward_hook")

    def end(self, output: Any) -> None:
        """Remove the hooks, then tell the probes; `output` is None if the forward pass raised."""
        if not self._is_open:
            return
        if output is not None and self._leaving_root:
            self._telling(self._leaving_root.targets)(self._root, *self._given, output)
        self._is_open = False
        self._given = ((), {})  # tensors may keep their hooks, which must not keep the model's inputs alive
        for probe in self._probes:
            self._loop.guard(probe, probe.forward_ended, output)

    def _begin(self, probe: Probe) -> None:
        probe.forward_begins()
        probe.inputs_given(*self._given)
        for tap in probe.module_taps():
            if self._part is not None and id(tap.module) not in self._part:
                continue
            for tapped, target in ((self._entered, tap.entered), (self._left, tap.left)):
                if target is None:
                    continue
                if (already := tapped.get(id(tap.module))) is None:
                    already = tapped[id(tap.module)] = _Tapped(tap.module, [])
                already.targets.append((probe, target))

    def _put(self, tapped: _Tapped, register: str) -> None:
        """Register a hook. If the module refuses it, what the probes wanted there is unavailable."""
        try:
            self._loop.module_hooks.put(tapped.module, register, self._telling(tapped.targets), with_kwargs=True)
        except Exception as error:
            self._loop.refused(tapped.module, [probe for probe, _ in tapped.targets], error)

    def _telling(self, targets: list[_Target]) -> Callable[..., None]:
        """The function that a module's hook calls, one for all probes that observe the module."""
        loop = self._loop

        def tell(module: nn.Module, *args: Any) -> None:
            if not (self._is_open and is_first_forward()):
                return
            with hidden_from_checkpointing(), loop.stopwatch:
                for probe, target in targets:
                    if loop.failures and not loop.runs(probe):
                        continue
                    try:
                        for tap in target(*args) or ():
                            hook = Hook(reaching(loop, probe, tap.reached), loop.hook_failed)
                            tap.tensor.register_hook(hook)
                    except Exception as error:
                        loop.switch_off(probe, error)

        return tell


class _Tapped(NamedTuple):
    """A module and the probe callbacks on it."""

    module: nn.Module
    targets: list[_Target]


def reaching(loop: Loop, probe: Probe, target: Callable[[Tensor], None]) -> Callable[[Tensor | None], None]:
    """A hook that passes a gradient on to a probe while the probe is switched on.

    A tensor may keep its hook after the monitor is closed. The hook must not hold the tensor, or the tensor would keep
    itself alive. Torch passes None if an operation has several outputs and the loss uses only others.
    """

    def reached(gradient: Tensor | None) -> None:
        if gradient is not None and not loop.is_closed and not (loop.failures and not loop.runs(probe)):
            with loop.stopwatch:
                loop.guard(probe, target, gradient)

    return reached


_passing: dict[int, Tree] = {}
"""The tree of the model whose hooks are being registered, by model id: several probes ask for it."""


def hookable_modules(model: nn.Module) -> dict[str, nn.Module]:
    """`Tree.hookable` of a model; within `Probe.module_taps`, the model is walked only if it has changed."""
    return _tree(model).hookable


def any_compiled(model: nn.Module) -> bool:
    """`Tree.any_compiled` of a model, just as cheap."""
    return _tree(model).any_compiled


def _tree(model: nn.Module) -> Tree:
    return _passing.get(id(model)) or Tree(model)


def differentiable(output: Any) -> Iterator[Tensor]:
    """The tensors in a module's inputs or outputs that a backward pass goes through, without parameters."""
    return (tensor for _, tensor in nested_tensors(output, local=False) if tensor.grad_fn is not None)
