"""Forward hooks on modules: whoever looks inside a model while it runs puts them on and takes them off here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from forewarn.measure.hidden_from_checkpointing import hidden_from_checkpointing
from forewarn.measure.hooks import Hook
from forewarn.measure.probe import ModuleTap


class ModuleHooks:
    """The hooks of some taps; they go away together.

    Activation checkpointing runs a forward again within the backward pass: hooks do nothing then.
    """

    def __init__(self, traced: bool = False) -> None:
        """`traced` is for hooks that torch.compile may meet."""
        self._traced = traced
        self._handles: list[Any] = []

    def __bool__(self) -> bool:
        return bool(self._handles)

    def put_on(self, tap: ModuleTap, always_call: bool = False) -> None:
        """With `always_call` the module is seen to be left also when it raises; its output is then None."""
        if tap.entered is not None:
            hook = Hook(first_forward_only(tap.entered), self._traced)
            self._handles.append(tap.module.register_forward_pre_hook(hook, with_kwargs=True))
        if tap.left is not None:
            hook = Hook(first_forward_only(tap.left), self._traced)
            self._handles.append(tap.module.register_forward_hook(hook, with_kwargs=True, always_call=always_call))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []


def first_forward_only(target: Callable[..., Any]) -> Callable[..., None]:
    """A hook that calls `target` with all but the module, and not when a forward is computed again."""

    def seen(module: nn.Module, *given: Any) -> None:
        if torch._C._current_graph_task_id() == -1:
            with hidden_from_checkpointing():
                target(*given)

    return seen
