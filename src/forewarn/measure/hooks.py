"""Hooks that torch may hold, copy and save: guarded, inert once they are removed, and never lost."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch

_own_passes: set[int] = set()
"""The threads that run one of the monitor's own backward passes; on a GPU, hooks run in one of torch's threads."""


@contextlib.contextmanager
def own_pass() -> Iterator[None]:
    """Mark a backward pass as the monitor's own: hooks ignore it."""
    try:
        _own_passes.add(threading.get_ident())
        yield
    finally:
        end_own_pass()


def is_own_pass() -> bool:
    """Whether any thread has such a mark."""
    return bool(_own_passes)


def end_own_pass() -> None:
    """Clear this thread's mark, which an interrupt in `own_pass` may have left behind."""
    _own_passes.discard(threading.get_ident())


class Hook:
    """A callable for torch's hooks; its copies and pickles do nothing, so that models can be copied and saved.

    With `failed` it also guards training: exceptions go to `failed` instead of torch. Interrupts still pass.
    """

    __slots__ = ("_failed", "_traced", "handle", "owner", "target")
    __torch_unserializable__ = True  # torch then saves a hooked tensor without a warning

    def __init__(
        self,
        target: Callable[..., object] | None = None,
        failed: Callable[[Exception], None] | None = None,
        traced: bool = False,
    ) -> None:
        self.target = target
        self._failed = failed
        self._traced = traced
        """Whether torch.compile may trace this hook. One on an optimizer then runs where the optimizer breaks the graph
        anyhow; the others do nothing."""
        self.owner: Any = None
        """The module, parameter or optimizer that has the hook."""
        self.handle: Any = None
        """The handle that torch returned; None if an interrupt came first."""

    def __call__(self, *args: Any) -> None:
        if self._traced and torch.compiler.is_compiling():
            if isinstance(self.owner, torch.optim.Optimizer):
                _run_outside_the_graph(self, args)
            return
        if self.target is not None and not _own_passes:
            try:
                self.target(*args)
            except Exception as error:
                if self._failed is None:
                    raise
                self._failed(error)

    def is_last(self) -> bool:
        """Whether torch calls it after all others of its kind; False if somebody else has removed it."""
        try:
            return bool(next(reversed(self.handle.hooks_dict_ref())) == self.handle.id)
        except (AttributeError, StopIteration, TypeError):  # not one of torch's handles, or nothing is left
            return False

    def take_off(self) -> None:
        """Remove the hook from its owner and disable it wherever it is still held; safe to call again."""
        self.target = None
        try:
            self.handle.remove()
        except Exception:  # there is no handle yet, or not one of torch's
            _delete(self, self.owner)
        if isinstance(self.owner, torch.Tensor) and not self.owner._backward_hooks:
            self.owner._backward_hooks = None  # torch spends time on empty hook lists

    def __deepcopy__(self, memo: dict[int, Any]) -> Hook:
        return Hook()

    def __reduce__(self) -> tuple[type[Hook], tuple[()]]:
        return (Hook, ())


@torch._disable_dynamo  # type: ignore[attr-defined]
def _run_outside_the_graph(hook: Hook, args: tuple[Any, ...]) -> None:
    hook(*args)


class Hooks:
    """Guarded hooks on modules, parameters and optimizers, removed together.

    A hook is remembered before it is registered and forgotten after it is removed. An interrupt at any line leaves it
    in the list, and the next `remove` finishes the work.
    """

    def __init__(self, failed: Callable[[Exception], None] | None = None, traced: bool = False) -> None:
        """`failed` receives exceptions instead of torch; `traced` is for hooks that torch.compile may trace."""
        self._failed = failed
        self._traced = traced
        self._hooks: list[Hook] = []

    def __bool__(self) -> bool:
        return bool(self._hooks)

    def __iter__(self) -> Iterator[Hook]:
        return iter(self._hooks)

    def put(self, owner: Any, register: str, target: Callable[..., object], **settings: bool) -> Hook:
        """Register a hook with this method of its owner; raises if the owner refuses."""
        hook = Hook(target, self._failed, self._traced)
        hook.owner = owner
        self._hooks.append(hook)
        try:
            hook.handle = getattr(owner, register)(hook, **settings)
        except Exception:
            hook.take_off()
            self._hooks.remove(hook)
            raise
        return hook

    def take_off(self, hooks: Collection[Hook]) -> None:
        """Remove some hooks."""
        for hook in hooks:
            hook.take_off()
        removed = set(map(id, hooks))
        self._hooks = [hook for hook in self._hooks if id(hook) not in removed]

    def remove(self) -> None:
        """Remove every hook; safe to call again."""
        hooks = self._hooks
        while hooks:
            hooks[-1].take_off()
            hooks.pop()


def _delete(hook: Hook, owner: Any) -> None:
    """Delete a hook from the dictionaries in which torch keeps the hooks of its owner."""
    if isinstance(owner, torch.Tensor):
        dictionaries = [owner._backward_hooks or {}]
    else:
        attributes = object.__getattribute__(owner, "__dict__")
        dictionaries = [held for name, held in attributes.items() if "hooks" in name and isinstance(held, dict)]
    keys = [key for held in dictionaries for key, value in held.items() if value is hook]
    for held in dictionaries:
        for key in keys:
            held.pop(key, None)
