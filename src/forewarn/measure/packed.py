"""Nested values as a list of tensors and a structure that JSON can store: dicts, lists, tuples and dataclasses."""

from __future__ import annotations

import math
from collections import namedtuple
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, make_dataclass
from keyword import iskeyword
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

_MOST_LEVELS = 16
"""Maximum nesting; a structure may contain itself."""
_MOST_NODES = 10_000
_MOST_CHARACTERS = 10_000
"""Maximum length of a string."""
_TOO_LARGE = "more than 10,000 parts"

Structure = dict[str, Any]
"""One node: `{"dict": [[key, node], …]}`, `{"tensor": 0}`, `{"value": 3}`; what cannot be kept is `{"left_out": …}`."""


@dataclass(slots=True)
class Packed:
    """A nested value without the objects of the user that held it."""

    structure: Structure = field(default_factory=dict)
    tensors: list[Tensor] = field(default_factory=list)
    """Detached, so that they keep no graph alive."""
    num_nodes: int = 0
    _versions: list[int] = field(default_factory=list)

    @property
    def changed(self) -> list[int]:
        """The places of the tensors that were changed in place since they were packed."""
        now = map(_version, self.tensors)
        return [index for index, (one, then) in enumerate(zip(now, self._versions, strict=True)) if one != then]


def _version(tensor: Tensor) -> int:
    """How often a tensor was changed in place; torch does not count that for tensors made in inference mode."""
    return -1 if tensor.is_inference() else tensor._version


def pack(value: Any, copies: bool = False) -> Packed:
    """The tensors in a nested value, or copies of them, and how they are nested."""
    packed = Packed()
    packed.structure = _packed(value, packed, _MOST_LEVELS)
    if copies:
        packed.tensors = [tensor.clone() for tensor in packed.tensors]
    packed._versions = list(map(_version, packed.tensors))
    return packed


def _packed(value: Any, into: Packed, levels: int) -> Structure:
    into.num_nodes += 1
    if isinstance(value, Tensor):
        return _packed_tensor(value, into)
    if value is None or isinstance(value, bool | int | str):
        return _packed_plain(value)
    if isinstance(value, float):
        return {"value": value} if math.isfinite(value) else {"float": str(value)}
    if levels == 0 or into.num_nodes > _MOST_NODES:
        return {"left_out": _TOO_LARGE if levels else "nested too deeply"}
    below = levels - 1
    if isinstance(value, np.ndarray | np.generic):
        return _packed_array(value, into)
    if isinstance(value, torch.dtype | torch.device):
        return {type(value).__name__: str(value).removeprefix("torch.")}
    if isinstance(value, Mapping):
        return {"dict": [[_packed(key, into, 1), _packed(item, into, below)] for key, item in value.items()]}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        kind = "packed_sequence" if isinstance(value, PackedSequence) else "namedtuple"
        items = zip(map(str, value._fields), value, strict=False)
        return {kind: [[name, _packed(item, into, below)] for name, item in items]}
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        room = max(0, _MOST_NODES - into.num_nodes)
        if len(value) > room:
            return {"left_out": _TOO_LARGE}
        return {kind: [_packed(item, into, below) for item in value]}
    if names := getattr(type(value), "__dataclass_fields__", None):
        return {"object": [[name, _packed(getattr(value, name, None), into, below)] for name in names]}
    return {"left_out": type(value).__name__}


def _packed_plain(value: Any) -> Structure:
    if isinstance(value, str) and len(value) > _MOST_CHARACTERS:
        return {"left_out": f"a string of {len(value)} characters"}
    if isinstance(value, int) and value.bit_length() > 64:
        return {"left_out": "an integer of more than 64 bits"}
    return {"value": value}


def _packed_tensor(tensor: Tensor, into: Packed) -> Structure:
    if hasattr(tensor, "to_local"):
        return {"left_out": "a tensor that is divided over ranks"}
    if tensor.is_nested or tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
        kind = "nested" if tensor.is_nested else "meta" if tensor.is_meta else str(tensor.layout).rpartition(".")[2]
        return {"left_out": f"a tensor of the kind {kind}"}
    node: Structure = {"tensor": len(into.tensors)}
    if tensor.requires_grad:
        node["requires_grad"] = True
    into.tensors.append(tensor.detach())
    return node


def _packed_array(array: Any, into: Packed) -> Structure:
    try:
        tensor = torch.from_numpy(np.array(array))  # a copy, because numpy tells nobody when an array changes
    except TypeError:
        return {"left_out": f"an array of the type {array.dtype}"}
    into.tensors.append(tensor)
    return {"tensor": len(into.tensors) - 1, "numpy": True}


def left_out(structure: Structure, path: str = "") -> list[str]:
    """The parts that could not be kept, each with its path: `[0][graph]: Data`."""
    (kind, held), *_ = structure.items()
    if kind == "left_out":
        return [f"{path or 'the value'}: {held}"]
    if kind in ("list", "tuple"):
        return [line for index, item in enumerate(held) for line in left_out(item, f"{path}[{index}]")]
    if kind in _NAMED:
        return [line for name, item in held for line in left_out(item, f"{path}[{_key(name)}]")]
    return []


def _key(name: Any) -> Any:
    return name.get("value", "?") if isinstance(name, dict) else name


def unpack(structure: Any, tensors: Sequence[Tensor]) -> Any:
    """The value that was packed, with plain dicts, tuples and objects for the user's own classes.

    What was left out becomes None. Raises ValueError if the structure is damaged: it may come from anywhere.
    """
    return _unpacked(structure, tensors, _MOST_LEVELS + 2)


def _unpacked(node: Any, tensors: Sequence[Tensor], levels: int) -> Any:
    if levels == 0:
        raise ValueError("its structure is damaged: it is nested too deeply")
    if not isinstance(node, dict) or not node:
        raise ValueError(f"its structure is damaged: {node!r:.80}")
    (kind, held), *_ = node.items()
    below = levels - 1
    if kind == "tensor":
        if not isinstance(held, int) or not 0 <= held < len(tensors):
            raise ValueError(f"its structure is damaged: there is no tensor {held!r:.80}")
        tensor = tensors[held]
        if node.get("numpy"):
            return tensor.numpy()
        return tensor.requires_grad_() if node.get("requires_grad") and tensor.is_floating_point() else tensor
    if kind == "value" and (held is None or isinstance(held, bool | int | float | str)):
        return held
    if kind == "float" and held in ("nan", "inf", "-inf"):
        return float(held)
    if kind == "left_out":
        return None
    if kind == "device" and isinstance(held, str):
        return torch.device(held)
    if kind == "dtype" and isinstance(held, str) and isinstance(dtype := getattr(torch, held, None), torch.dtype):
        return dtype
    if kind in ("list", "tuple") and isinstance(held, list):
        items = [_unpacked(item, tensors, below) for item in held]
        return items if kind == "list" else tuple(items)
    if kind in _NAMED and isinstance(held, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in held):
        if kind == "dict":
            return {_hashable(key, tensors): _unpacked(item, tensors, below) for key, item in held}
        return _with_names(kind, {str(name): _unpacked(item, tensors, below) for name, item in held})
    raise ValueError(f"its structure is damaged: {kind!r:.80}")


_NAMED = ("dict", "namedtuple", "packed_sequence", "object")


def _hashable(key: Any, tensors: Sequence[Tensor]) -> Any:
    value = _unpacked(key, tensors, 2)
    try:
        hash(value)
    except TypeError:
        raise ValueError(f"its structure is damaged: {key!r:.80} is no key") from None
    return value


def _with_names(kind: str, values: dict[str, Any]) -> Any:
    if not all(name.isidentifier() and not iskeyword(name) for name in values):
        raise ValueError("its structure is damaged: a name is not a word")
    if kind == "object":
        return make_dataclass("Kept", values)(**values)
    if kind == "packed_sequence":
        return PackedSequence(*values.values())
    return namedtuple("Kept", values, rename=True)(*values.values())
