"""Keeps the random numbers of a run as they are while code of others runs, such as a package that is imported.

It imports neither torch nor numpy: one that is not imported yet has no random state to keep.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any


@contextlib.contextmanager
def random_states_kept() -> Iterator[None]:
    """Restore the random states of Python, numpy and torch (on the CPU) after this block, where it has moved them."""
    python = random.getstate()
    numpy = _loaded("numpy.random")
    of_numpy = None if numpy is None else numpy.get_state()
    torch = _loaded("torch")
    of_torch = None if torch is None else torch.get_rng_state()
    try:
        yield
    finally:
        if random.getstate() != python:
            random.setstate(python)
        if numpy is not None:
            numpy.set_state(of_numpy)
        if torch is not None:
            torch.set_rng_state(of_torch)


def _loaded(name: str) -> Any:
    """A module that is imported, and not just being imported; None if it is not."""
    module = sys.modules.get(name)
    spec = getattr(module, "__spec__", None)
    return None if module is None or getattr(spec, "_initializing", False) else module


class _KeepingFinder:
    """Imports the modules of this package without moving a random state: rich draws a number as it is imported."""

    @staticmethod
    def find_spec(fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if not fullname.startswith("forewarn."):
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                with random_states_kept():
                    execute(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def keep_on_import() -> None:
    """Keep the random states whenever a module of this package is imported, in whatever way."""
    if not any(isinstance(finder, _KeepingFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _KeepingFinder())
