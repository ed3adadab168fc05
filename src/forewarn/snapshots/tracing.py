"""Follows a forward and backward pass module by module, and finds where it first goes wrong."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from forewarn.codec import Noun
from forewarn.measure.module_tree import clean_name, named_modules
from forewarn.measure.nested import nested_tensors
from forewarn.snapshots.tensor_facts import TensorFacts, facts, named_facts

_OUT_OF_SCALE = 100.0
"""An output or gradient is out of scale if it is this many times its usual size in the run."""
_FROM_ITS_INPUT = 1000.0
"""Without readings of the run: if it is this many times the largest value that went in."""


@dataclass(frozen=True, slots=True)
class Place(Noun):
    """Where a pass first goes wrong."""

    module: str
    """The name of the module; empty for the model itself."""
    kind: str
    """Its class."""
    direction: str
    """`forward` or `backward`."""
    fault: str
    """`non_finite` or `out_of_scale`."""
    words: str
    inputs: tuple[TensorFacts, ...]
    """What went into the module."""
    weights: tuple[TensorFacts, ...]
    """Its own parameters, without those of the modules inside."""
    outputs: tuple[TensorFacts, ...]
    """What came out of it: values or, backwards, gradients."""


@dataclass(slots=True)
class _Event:
    """A module was entered or left, in the order in which that happened."""

    module: str
    is_exit: bool
    facts: list[TensorFacts]
    caller: str | None
    """The module that called it; None if the loop did."""

    @property
    def is_finite(self) -> bool:
        return all(one.is_finite for one in self.facts)


@dataclass(slots=True)
class _Gradient:
    """A gradient arrived at a tensor."""

    module: str
    role: str
    """`output` or `input` of the module, or the name of its parameter."""
    tensor: int
    """The id of the tensor."""
    facts: TensorFacts
    norm: float = 0.0


class Trace:
    """What every module took and gave. Use `with trace.hooks():` around the passes."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = {clean_name(f"{name}.").removesuffix("."): module for name, module in named_modules(model)}
        self.running: list[str] = []
        """The modules that run now, the innermost last; if a pass raised, where it did."""
        self._events: list[_Event] = []
        self._num_sound: int | None = None
        """Number of events before the first that is not finite; None if there is none."""
        self._inputs: dict[str, list[TensorFacts]] = {}
        self._outputs: dict[str, list[TensorFacts]] = {}
        self._callers: dict[str, str | None] = {}
        self._gradients: list[_Gradient] = []
        self._takers: dict[int, list[str]] = {}
        """By the id of a tensor: the modules that took it."""
        self._alive: list[Tensor] = []
        """Tensors whose ids must not be used again."""
        self._final: set[int] = set()
        """The ids of the tensors that the loop got."""
        self.last_input: Any = None
        """The arguments of the module that was entered last."""
        self.last_output: Any = None

    @contextmanager
    def hooks(self) -> Iterator[None]:
        handles: list[Any] = []
        try:
            for name, module in self.modules.items():
                handles.append(module.register_forward_pre_hook(partial(self._entered, name), with_kwargs=True))
                handles.append(module.register_forward_hook(partial(self._left, name)))
                for key, parameter in module._parameters.items():
                    if parameter is not None and parameter.requires_grad:
                        handles.append(parameter.register_hook(self._gradient_of(name, key, parameter)))
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _entered(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch._C._current_graph_task_id() != -1:  # recomputed for the backward pass
            return
        self.last_input = (args, kwargs)
        taken = argument_facts(module, args, kwargs)
        caller = self.running[-1] if self.running else None
        self.running.append(name)
        self._inputs[name], self._callers[name] = taken, caller
        self._events.append(_Event(name, False, taken, caller))
        for _, tensor in nested_tensors((args, kwargs)):
            if tensor.requires_grad:
                self._takers.setdefault(id(tensor), []).append(name)
                self._alive.append(tensor)
                tensor.register_hook(self._gradient_of(name, "input", tensor))

    def _left(self, name: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if torch._C._current_graph_task_id() != -1:
            return
        given = named_facts(output, "output")
        if self.running and self.running[-1] == name:
            self.running.pop()
        self._outputs[name] = given
        self._events.append(_Event(name, True, given, self._callers[name]))
        self.last_output = output
        for _, tensor in nested_tensors(output):
            if tensor.requires_grad:
                self._alive.append(tensor)
                tensor.register_hook(self._gradient_of(name, "output", tensor))
                if self._callers[name] is None:
                    self._final.add(id(tensor))

    def _gradient_of(self, name: str, role: str, tensor: Tensor) -> Callable[[Tensor | None], None]:
        identity = id(tensor)

        def arrived(gradient: Tensor | None) -> None:
            if gradient is not None:
                about = facts(gradient, f"gradient of {'its ' if role in ('input', 'output') else ''}{role}")
                norm = about.rms * gradient.numel() ** 0.5
                self._gradients.append(_Gradient(name, role, identity, about, norm))

        return arrived

    def first_forward(self, is_loss_finite: bool) -> Place | None:
        """The first module whose input or output is not finite; None if all are."""
        for index, event in enumerate(self._events):
            if event.is_finite or not self._matters(index, is_loss_finite):
                continue
            self._num_sound = index
            if event.is_exit:
                held = [one for one in self.modules[event.module]._parameters.values() if one is not None]
                is_ruined = any(not facts(parameter).is_finite for parameter in held)
                words = "its weights are not finite" if is_ruined else "its output is the first that is not finite"
                return self._place(event.module, "non_finite", words)
            if event.caller is None:
                return self._place(event.module, "non_finite", "its input is not finite", [])
            words = f"its own code makes a value that is not finite, before it calls {event.module}"
            return self._place(event.caller, "non_finite", words, event.facts)
        return None

    def _matters(self, index: int, is_loss_finite: bool) -> bool:
        """Whether what is not finite is no mask: -∞ alone that the next module takes away, as a softmax does."""
        event = self._events[index]
        if not all(one.is_finite or one.may_be_masked for one in event.facts):
            return True
        later = (
            other
            for other in self._events[index + 1 :]
            if other.is_exit and other.module != event.module and not f"{event.module}.".startswith(f"{other.module}.")
        )
        follower = next(later, None)
        return not is_loss_finite if follower is None else not follower.is_finite

    def first_out_of_scale(self, usual: Mapping[tuple[str, str], float]) -> Place | None:
        """The first module whose output is far larger than usual, or than its input; None if there is none.

        After `first_forward`, one before the place that it found.
        """
        for event in self._events[: self._num_sound]:
            largest = max((one.abs_max for one in event.facts if one.is_finite), default=0.0)
            if not event.is_exit or not largest > 0:
                continue
            level = usual.get(("activation/abs_max", event.module))
            if level is not None and level > 0 and largest > _OUT_OF_SCALE * level:
                words = f"its output is {largest / level:.3g} times as large as usual"
                return self._place(event.module, "out_of_scale", words)
            taken = max((one.abs_max for one in self._inputs[event.module] if _is_float(one)), default=0.0)
            if level is None and taken > 0 and largest > _FROM_ITS_INPUT * max(taken, 1.0):
                words = f"its output is {largest / taken:.3g} times as large as its input"
                return self._place(event.module, "out_of_scale", words)
        return None

    def first_backward(self) -> Place | None:
        """The module in whose backward pass a gradient first is not finite; None if all are finite."""
        wrong = next((one for one in self._gradients if not one.facts.is_finite), None)
        if wrong is None:
            return None
        if wrong.role not in ("input", "output"):
            words = f"the gradient of its {wrong.role} is the first that is not finite"
            return self._place(wrong.module, "non_finite", words, [wrong.facts], backward=True)
        # Whoever took the tensor made its gradient: the innermost one whose own output has a finite gradient.
        takers = [name for name in self._takers.get(wrong.tensor, ()) if self._has_finite_output_gradient(name)]
        if takers:
            words = "its backward pass makes the first gradient that is not finite"
            return self._place(takers[-1], "non_finite", words, [wrong.facts], backward=True)
        caller = self._callers.get(wrong.module)
        if wrong.role == "output" and caller is not None and wrong.tensor not in self._final:
            words = f"its own code after {wrong.module} makes the first gradient that is not finite"
            return self._place(caller, "non_finite", words, [wrong.facts], backward=True)
        words = "the loss function makes a gradient of its output that is not finite"
        return self._place(self._called_by_the_loop(wrong.module), "non_finite", words, [wrong.facts], backward=True)

    def first_gradient_out_of_scale(self, usual: Mapping[tuple[str, str], float]) -> Place | None:
        """The first parameter, backwards, whose gradient is far larger than usual in the run."""
        for one in self._gradients:
            scope = f"{one.module}.{one.role}" if one.module else one.role
            level = usual.get(("gradient/norm", scope))
            if level is not None and level > 0 and one.norm > _OUT_OF_SCALE * level:
                words = f"the gradient of its {one.role} is {one.norm / level:.3g} times as large as usual"
                return self._place(one.module, "out_of_scale", words, [one.facts], backward=True)
        return None

    @property
    def has_gradients(self) -> bool:
        return bool(self._gradients)

    def _called_by_the_loop(self, name: str) -> str:
        """The outermost module around a module."""
        while (caller := self._callers.get(name)) is not None:
            name = caller
        return name

    def _has_finite_output_gradient(self, name: str) -> bool:
        own = [one.facts.is_finite for one in self._gradients if one.module == name and one.role == "output"]
        return bool(own) and all(own)

    def place_of_error(self, words: str) -> Place:
        """Where a pass raised."""
        return self._place(self.running[-1] if self.running else "", "error", words)

    def _place(
        self, name: str, fault: str, words: str, outputs: Sequence[TensorFacts] | None = None, backward: bool = False
    ) -> Place:
        given = self._outputs.get(name, []) if outputs is None else outputs
        direction = "backward" if backward else "forward"
        kind = type(self.modules[name]).__name__
        held = self.modules[name]._parameters.items()
        weights = tuple(facts(parameter, key) for key, parameter in held if parameter is not None)
        return Place(name, kind, direction, fault, words, tuple(self._inputs.get(name, ())), weights, tuple(given))


def argument_facts(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[TensorFacts]:
    """The tensors in the arguments of a module, by the names that its `forward` gives them."""
    return [one for name, value in named_arguments(module, args, kwargs) for one in named_facts(value, name)]


def named_arguments(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The arguments of a module by name."""
    try:
        parameters = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):
        parameters = ()  # type: ignore[assignment]
    plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [parameter.name for parameter in parameters if parameter.kind in plain]
    names += [f"[{index}]" for index in range(len(names), len(args))]
    return [*zip(names, args, strict=False), *kwargs.items()]


def _is_float(one: TensorFacts) -> bool:
    return "float" in one.dtype and one.is_finite
