"""Callables that torch may hold, copy and save without ever reaching back to a monitor by accident."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Hook:
    """A hook whose copy and whose pickle do nothing, so that `deepcopy(model)` and `torch.save(model)` work."""

    __torch_unserializable__ = True  # torch then saves a hooked tensor without a warning

    def __init__(self, target: Callable[..., None] | None = None) -> None:
        self._target = target

    def __call__(self, *args: Any) -> None:
        if self._target is not None:
            self._target(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> Hook:
        return Hook()

    def __reduce__(self) -> tuple[type[Hook], tuple[()]]:
        return (Hook, ())
