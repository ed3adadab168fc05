"""Forward hooks on modules, registered and removed together."""

from __future__ import annotations

from collections.abc import Callable, Collection
from operator import call
from typing import Any

import torch
from torch import nn

from forewarn.measure.hidden_from_checkpointing import hidden_from_checkpointing
from forewarn.measure.hooks import Hook, Hooks
from forewarn.measure.probe import ModuleTap

_graph_task = torch._C._current_graph_task_id
_tracing_state = torch._C._get_tracing_state
_interpreter = torch._C._functorch.peek_interpreter_stack


class ModuleHooks(Hooks):
    """The hooks of several taps, removed together.

    Activation checkpointing repeats a forward within the backward pass: hooks do nothing then.
    """

    def put_on(self, tap: ModuleTap, always_call: bool = False) -> None:
        """With `always_call`, `left` is also called if the module raises; its output is then None."""
        if tap.entered is not None:
            self.put(tap.module, "register_forward_pre_hook", first_forward_only(tap.entered), with_kwargs=True)
        if tap.left is not None:
            target = first_forward_only(tap.left)
            self.put(tap.module, "register_forward_hook", target, with_kwargs=True, always_call=always_call)


class StandingHooks(Hooks):
    """Hooks that stay on modules while steps in a row are measured; each pass says what they call.

    To register and remove one takes as long as ten calls of it.
    """

    def __init__(self, failed: Callable[[Exception], None]) -> None:
        super().__init__(failed, traced=True)  # the model may be compiled meanwhile
        self._standing: dict[tuple[int, str], Hook] = {}
        self._places: list[Callable[[], Any]] = []
        """Weak references to the dictionaries in which torch keeps these hooks."""
        self._ids: list[int] = []
        """Their keys there."""
        self.is_complete = True
        """Whether no module has refused one."""

    def all_stand(self) -> bool:
        """Whether no module has refused a hook, and torch still calls each after all others of its kind."""
        if len(self._ids) != len(self._standing):
            hooks = self._standing.values()
            self._places = [hook.handle.hooks_dict_ref for hook in hooks]
            self._ids = [hook.handle.id for hook in hooks]
        try:
            return self.is_complete and list(map(next, map(reversed, map(call, self._places)))) == self._ids
        except TypeError:  # a dictionary is gone
            return False

    def keep_only(self, wanted: Collection[tuple[int, str]]) -> None:
        """Remove the hooks that nobody wants any more; `wanted` are module ids and methods of registration."""
        unwanted = self._standing.keys() - set(wanted)
        if unwanted:
            self.take_off([self._standing.pop(key) for key in unwanted])
            self._ids = []

    def direct(self, module: nn.Module, register: str, target: Callable[..., object]) -> None:
        """Let a module call `target` with the hook that it has, or with a new one; raises if it refuses."""
        hook = self._standing.get((id(module), register))
        if hook is not None and hook.is_last():  # a hook that came later may change what this one sees
            hook.target = target
            return
        if hook is not None:
            hook.take_off()
        self._ids = []
        self._standing[id(module), register] = self.put(module, register, target, with_kwargs=True)

    def remove(self) -> None:
        super().remove()
        self._standing.clear()
        self._ids = []
        self.is_complete = True


def is_transformed() -> bool:
    """Whether the model is being traced, or runs inside a transform such as vmap: its tensors then have no values."""
    return _tracing_state() is not None or _interpreter() is not None


def is_first_forward() -> bool:
    """Whether this is neither a recomputation within a backward pass nor a transform."""
    return _graph_task() == -1 and _tracing_state() is None and _interpreter() is None


def first_forward_only(target: Callable[..., Any]) -> Callable[..., None]:
    """A hook that calls `target` without the module argument, except during recomputation or in a transform."""

    def seen(module: nn.Module, *args: Any) -> None:
        if is_first_forward():
            with hidden_from_checkpointing():
                target(*args)

    return seen
