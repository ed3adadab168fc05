"""Callables that torch may hold, copy and save without ever reaching back to a monitor by accident."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

_own_passes = 0
"""Backward passes of the monitor itself that are under way; on a GPU they run in a thread of torch's."""


@contextlib.contextmanager
def own_pass() -> Iterator[None]:
    """For a backward pass that is the monitor's own: no hook may take it for one of the training run."""
    global _own_passes
    _own_passes += 1
    try:
        yield
    finally:
        _own_passes -= 1


class Hook:
    """A door through which torch calls us; its copy and its pickle do nothing, so that models can be copied and saved.

    With `failed` it is also the outer guard: no exception gets through to torch, and `failed` is told of it.
    """

    __torch_unserializable__ = True  # torch then saves a hooked tensor without a warning

    def __init__(
        self,
        target: Callable[..., None] | None = None,
        traced: bool = False,
        failed: Callable[[Exception], None] | None = None,
    ) -> None:
        self._target = target
        self._failed = failed
        self._traced = traced
        """Whether torch.compile may meet it while it traces a model: it is then left out of the graph."""

    def __call__(self, *args: Any) -> None:
        if self._traced and torch.compiler.is_compiling():
            return
        if self._target is not None and not _own_passes:
            try:
                self._target(*args)
            except Exception as error:
                if self._failed is None:
                    raise
                self._failed(error)

    def __deepcopy__(self, memo: dict[int, Any]) -> Hook:
        return Hook()

    def __reduce__(self) -> tuple[type[Hook], tuple[()]]:
        return (Hook, ())
