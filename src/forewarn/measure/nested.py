"""The tensors inside whatever modules take and give."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor


def nested_tensors(value: Any, max_depth: int = 3, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Each tensor in tuples, lists, mappings and dataclasses, with where it is: `[0]`, `[1][state]`.

    A tensor that is not inside anything has the path "". A structure may contain itself, so the depth has a limit.
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
