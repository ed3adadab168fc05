"""The tensors inside the inputs and outputs of modules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

from forewarn.measure.shards import local_part


def nested_tensors(
    value: Any, max_depth: int = 3, path: str = "", *, local: bool = True
) -> Iterator[tuple[str, Tensor]]:
    """Each tensor in tuples, lists, mappings and dataclasses, with its path: `[0]`, `[1][state]`.

    A bare tensor has the path "". A structure may contain itself, so the depth is limited. Of a DTensor, the part that
    this rank holds is returned if `local`: operations on the whole may need the other ranks.
    """
    if isinstance(value, Tensor):
        tensor = local_part(value) if local else value
        if tensor is not None:
            yield path, tensor
    elif max_depth > 0:
        for key, part in _parts(value):
            yield from nested_tensors(part, max_depth - 1, f"{path}[{key}]", local=local)


def _parts(value: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        return value.items()
    if isinstance(value, list | tuple):
        return enumerate(value)
    return ((name, getattr(value, name, None)) for name in getattr(value, "__dataclass_fields__", ()))
