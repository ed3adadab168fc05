"""The tensors inside the inputs and outputs of modules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor


def nested_tensors(value: Any, max_depth: int = 3, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Each tensor in tuples, lists, mappings and dataclasses, with its path: `[0]`, `[1][state]`.

    A bare tensor has the path "". A structure may contain itself, so the depth is limited.
    """
    if isinstance(value, Tensor):
        yield path, value
    elif max_depth > 0:
        for key, part in _parts(value):
            yield from nested_tensors(part, max_depth - 1, f"{path}[{key}]")


def _parts(value: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        return value.items()
    if isinstance(value, list | tuple):
        return enumerate(value)
    return ((name, getattr(value, name, None)) for name in getattr(value, "__dataclass_fields__", ()))
