"""JSON that round-trips infinities and NaN."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from forewarn.codec import check_depth

# JSON cannot express NaN and infinity. They become {"__float__": "nan"}, which any JSON reader can parse.
_FLOAT = "__float__"

_MOST_DIGITS = 300
"""Integers with more digits do not fit in a float, so they are read as text."""


def encoded(value: Any) -> str:
    """`value` as strictly valid JSON; a type that JSON does not have, such as a path, becomes text."""
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return json.dumps(_plain(value), allow_nan=False)


def decoded(text: str) -> Any:
    """The value passed to `encoded`, with tuples as lists. Raises ValueError for invalid JSON."""
    try:
        value = json.loads(text, object_hook=_float_or_object, parse_int=_whole_number)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    check_depth(value)
    return value


def storable(text: str) -> str:
    """`text` without lone surrogates, which file names may contain and databases refuse."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {_FLOAT: str(float(value))}
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # a numpy number
        return _plain(value.item())
    return str(value)


def _float_or_object(data: dict[str, Any]) -> Any:
    if data.keys() == {_FLOAT} and isinstance(data[_FLOAT], str):
        return float(data[_FLOAT])
    return data


def _whole_number(digits: str) -> int | str:
    return int(digits) if len(digits) <= _MOST_DIGITS else digits
