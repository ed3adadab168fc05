"""What the hooks inside a model do during a measured forward pass in training mode."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from operator import is_
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from forewarn.measure.hidden_from_checkpointing import hidden_from_checkpointing
from forewarn.measure.hooks import Hook
from forewarn.measure.module_hooks import is_first_forward
from forewarn.measure.module_tree import Seen, Tree, named_modules
from forewarn.measure.nested import nested_tensors
from forewarn.measure.probe import GradientTap, ModuleTap, Probe

if TYPE_CHECKING:
    from forewarn.measure.loop import Loop


_ENTERED, _LEFT = "register_forward_pre_hook", "register_forward_hook"

_Target = tuple[Probe, Callable[..., Iterable[GradientTap] | None]]
"""A probe and its callback, which takes a module's arguments, or its arguments and output."""
_Asked = list[tuple[Probe, tuple[ModuleTap, ...]]]
"""Each probe and the modules that it wants to see."""


class ForwardPass:
    """One measured forward pass: one hook before and one after each module, for all probes, that work until `end`.

    A hook costs 1.5 µs per call even when it does nothing, so hooks are there only while steps in a row are measured.
    Activation checkpointing recomputes within the backward pass, after the end of the pass.
    """

    def __init__(self, loop: Loop, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._loop = loop
        self._probes = list(loop.probes)
        self._root = root
        self._given = (args, kwargs)
        self.is_open = True

    def begin(self) -> None:
        """Direct the hooks to what the probes want to see."""
        loop, root = self._loop, self._root
        seen = loop.tree.seen()
        if seen.hookable is not loop.hooked:  # a hook must not keep a module that was taken out
            loop.module_hooks.remove()
            loop.hooked = seen.hookable
        _passing[id(loop.model)] = seen
        try:
            asked = [(probe, loop.guard(probe, self._asked, probe) or ()) for probe in self._probes]
        finally:
            _passing.clear()
        before = loop.taps
        if before is None or not before.hold(root, asked):
            loop.taps = Taps(loop, root, asked)
        taps = loop.taps
        assert taps is not None
        # The root's hooks are already running and it can take no more, so its probes are called here and in `end`.
        if taps.entering_root is not None:
            taps.entering_root(root, *self._given)
        if taps is before and loop.module_hooks.all_stand():
            return
        if before is not None and before.root is root:
            loop.module_hooks.keep_only((*zip(taps.entered, repeat(_ENTERED)), *zip(taps.left, repeat(_LEFT))))
        for tapped in taps.entered.values():
            self._put(tapped, _ENTERED)
        for tapped in taps.left.values():
            self._put(tapped, _LEFT)

    def end(self, output: Any) -> None:
        """Disable the hooks, then tell the probes; `output` is None if the forward pass raised."""
        if not self.is_open:
            return
        taps = self._loop.taps
        if output is not None and taps is not None and taps.leaving_root is not None:
            taps.leaving_root(self._root, *self._given, output)
        self.is_open = False
        self._given = ((), {})
        for probe in self._probes:
            self._loop.guard(probe, probe.forward_ended, output)

    def _asked(self, probe: Probe) -> tuple[ModuleTap, ...]:
        probe.forward_begins()
        probe.inputs_given(*self._given)
        return tuple(probe.module_taps())

    def _put(self, tapped: _Tapped, register: str) -> None:
        """Direct a hook. If the module refuses it, what the probes wanted there is unavailable."""
        try:
            self._loop.module_hooks.direct(tapped.module, register, tapped)
        except Exception as error:
            self._loop.module_hooks.is_complete = False
            self._loop.refused(tapped.module, [probe for probe, _ in tapped.targets], error)


class Taps:
    """Who is told about each module. As long as the probes want to see the same, nothing is made anew."""

    def __init__(self, loop: Loop, root: nn.Module, asked: _Asked) -> None:
        self._loop = loop
        self.root = root
        self._asked = asked
        self.entered: dict[int, _Tapped] = {}
        """By module id, since a module may define its own equality."""
        self.left: dict[int, _Tapped] = {}
        self._part = None if root is loop.model else {id(module) for _, module in named_modules(root)}
        """The ids of the modules inside, if only a part of the model runs."""
        for probe, taps in asked:
            loop.guard(probe, self._add, probe, taps)
        self.entering_root = self.entered.pop(id(root), None)
        self.leaving_root = self.left.pop(id(root), None)

    def hold(self, root: nn.Module, asked: _Asked) -> bool:
        """Whether the same probes want to see the same."""
        return (
            root is self.root
            and len(asked) == len(self._asked)
            and all(
                probe is before[0] and len(taps) == len(before[1]) and all(map(is_, taps, before[1]))
                for (probe, taps), before in zip(asked, self._asked, strict=True)
            )
        )

    def _add(self, probe: Probe, taps: Sequence[ModuleTap]) -> None:
        for tap in taps:
            if self._part is not None and id(tap.module) not in self._part:
                continue
            for of_side, target in ((self.entered, tap.entered), (self.left, tap.left)):
                if target is None:
                    continue
                if (already := of_side.get(id(tap.module))) is None:
                    already = of_side[id(tap.module)] = _Tapped(self._loop, self, tap.module)
                already.targets.append((probe, target))


class _Tapped:
    """A module and the probe callbacks on it, which its hook calls."""

    __slots__ = ("_loop", "_taps", "module", "targets")

    def __init__(self, loop: Loop, taps: Taps, module: nn.Module) -> None:
        self._loop, self._taps, self.module = loop, taps, module
        self.targets: list[_Target] = []

    def __call__(self, module: nn.Module, *args: Any) -> None:
        loop = self._loop
        if loop.forward is None or not loop.forward.is_open or loop.taps is not self._taps or not is_first_forward():
            return
        with hidden_from_checkpointing(), loop.stopwatch:
            for probe, target in self.targets:
                if loop.failures and not loop.runs(probe):
                    continue
                try:
                    for tap in target(*args) or ():
                        hook = Hook(Reached(loop, probe, tap.reached), loop.hook_failed)
                        tap.tensor.register_hook(hook)
                except Exception as error:
                    loop.switch_off(probe, error)


class Reached:
    """Passes a gradient on to a probe while the probe is switched on; what the hook on a tensor calls.

    A tensor may keep its hook after the monitor is closed. The hook must not hold the tensor, or the tensor would keep
    itself alive. This is one object, because hundreds of them live until the backward pass, and Python's garbage
    collector looks at each.
    """

    __slots__ = ("_loop", "_probe", "_target")

    def __init__(self, loop: Loop, probe: Probe, target: Callable[[Tensor], None]) -> None:
        self._loop, self._probe, self._target = loop, probe, target

    def __call__(self, gradient: Tensor | None) -> None:
        """Torch passes None if an operation has several outputs and the loss uses only others."""
        loop = self._loop
        if gradient is None or loop.is_closed or not loop.step.measured:
            return
        if loop.failures and not loop.runs(self._probe):
            return
        with loop.stopwatch:
            try:
                self._target(gradient)
            except Exception as error:
                loop.switch_off(self._probe, error)


_passing: dict[int, Seen] = {}
"""By model id, the modules of the model whose hooks are being directed: several probes ask for them."""


def hookable_modules(model: nn.Module) -> dict[str, nn.Module]:
    """`Seen.hookable` of a model; within `Probe.module_taps`, the model has been walked already."""
    return _seen(model).hookable


def any_compiled(model: nn.Module) -> bool:
    """`Seen.any_compiled` of a model, just as cheap."""
    return _seen(model).any_compiled


def _seen(model: nn.Module) -> Seen:
    return _passing.get(id(model)) or Tree(model).seen()


def differentiable(output: Any) -> list[Tensor]:
    """The tensors in a module's inputs or outputs that a backward pass goes through, without parameters."""
    if isinstance(output, Tensor):
        return [] if output.grad_fn is None else [output]
    return [tensor for _, tensor in nested_tensors(output, local=False) if tensor.grad_fn is not None]


def received(inputs: Any) -> list[Tensor]:
    """The tensors in a module's inputs that require a gradient but come from no operation, without parameters.

    A stage of a pipeline gets such inputs: another rank computed them, and wants their gradient.
    """
    tensors = (tensor for _, tensor in nested_tensors(inputs, local=False))
    return [
        tensor
        for tensor in tensors
        if tensor.requires_grad and tensor.grad_fn is None and not isinstance(tensor, nn.Parameter)
    ]
