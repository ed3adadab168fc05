"""The binary answers of the server: a JSON header, then arrays of 4-byte numbers, all little-endian."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

_ALIGNMENT = 4


def packed(header: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> bytes:
    """The header and the arrays; integers become uint32, everything else float32."""
    plain: dict[str, NDArray[Any]] = {}
    for name, array in arrays.items():
        is_integer = np.issubdtype(array.dtype, np.integer)
        with np.errstate(over="ignore"):
            plain[name] = np.ascontiguousarray(array.ravel(), "<u4" if is_integer else "<f4")
    described = [
        {"name": name, "type": "uint32" if array.dtype.kind == "u" else "float32", "length": array.size}
        for name, array in plain.items()
    ]
    text = json_bytes({**header, "arrays": described})
    text += b" " * (-len(text) % _ALIGNMENT)
    return b"".join([len(text).to_bytes(4, "little"), text, *(array.tobytes() for array in plain.values())])


def json_bytes(value: Any) -> bytes:
    """JSON in UTF-8, with null for numbers that are not finite."""
    try:
        text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    except ValueError:
        text = json.dumps(without_nan(value), allow_nan=False, separators=(",", ":"))
    return text.encode()


def without_nan(value: Any) -> Any:
    """The same value with None for numbers that are not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(item) for item in value]
    return value
