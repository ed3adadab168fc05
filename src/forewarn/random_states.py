"""The random states of a run: saved, restored, and kept unchanged while other code runs, such as an import.

On its own it imports neither torch nor numpy: a package that is not imported yet has no random state to keep.
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
    """Restore the random states of Python, numpy and torch (CPU) after this block, if it changed them."""
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


def random_state() -> dict[str, Any]:
    """The state of every random generator that training may draw from, as tensors and plain values."""
    import torch

    version, numbers, gauss = random.getstate()
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": [version, list(numbers), gauss]}
    if torch.cuda.is_initialized():  # asking would initialize it, which takes memory
        state["cuda"] = torch.cuda.get_rng_state_all()
    if (numpy := sys.modules.get("numpy")) is not None:
        name, keys, position, has_gauss, cached = numpy.random.get_state()
        state["numpy"] = [name, torch.from_numpy(keys.astype("int64")), position, has_gauss, cached]
    return state


def restore_random_state(state: dict[str, Any]) -> None:
    """Restore a `random_state`."""
    import torch

    torch.set_rng_state(state["torch"])
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])
    if "numpy" in state:
        import numpy as np

        name, keys, position, has_gauss, cached = state["numpy"]
        np.random.set_state((name, keys.numpy().astype("uint32"), position, has_gauss, cached))


def _loaded(name: str) -> Any:
    """A fully imported module; None if it is not imported or still being imported."""
    module = sys.modules.get(name)
    spec = getattr(module, "__spec__", None)
    return None if module is None or getattr(spec, "_initializing", False) else module


class _KeepingFinder:
    """Imports the modules of this package without changing a random state: rich draws a random number on import."""

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
    """Keep the random states unchanged whenever a module of this package is imported."""
    if not any(isinstance(finder, _KeepingFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _KeepingFinder())
