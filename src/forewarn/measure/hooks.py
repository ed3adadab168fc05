"""Hooks that torch may hold, copy and save without keeping a reference to the monitor."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

_own_passes = 0
"""The monitor's own backward passes in progress; on a GPU they run in one of torch's threads."""


@contextlib.contextmanager
def own_pass() -> Iterator[None]:
    """Mark a backward pass as the monitor's own: hooks ignore it."""
    global _own_passes
    _own_passes += 1
    try:
        yield
    finally:
        _own_passes -= 1


class Hook:
    """A callable for torch's hooks; its copies and pickles do nothing, so that models can be copied and saved.

    With `failed` it is also the outer guard: exceptions go to `failed` instead of torch.
    """

    __slots__ = ("_failed", "_target", "_traced")
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
        """Whether torch.compile may trace this hook: it is then left out of the graph."""

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
