"""Callables that torch may hold, copy and save without ever reaching back to a monitor by accident."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Hook:
    """A hook whose copy and whose pickle do nothing, so that `deepcopy(model)` and `torch.save(model)` work."""

    __torch_unserializable__ = True  # torch then saves a hooked tensor without a warning

    def __init__(self, target: Callable[..., None] | None = None, traced: bool = False) -> None:
        self._target = target
        self._traced = traced
        """Whether torch.compile may meet it while it traces a model: it is then left out of the graph."""

    def __call__(self, *args: Any) -> None:
        if self._traced and torch.compiler.is_compiling():
            return
        if self._target is not None:
            self._target(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> Hook:
        return Hook()

    def __reduce__(self) -> tuple[type[Hook], tuple[()]]:
        return (Hook, ())
