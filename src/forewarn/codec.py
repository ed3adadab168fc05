"""Converts the shared dataclasses to plain values for JSON, and back."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from enum import IntEnum
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Self, cast, get_args, get_origin, get_type_hints

_MOST_LEVELS = 64
"""Maximum nesting of values from a file; code that reads, copies or prints them recurses once per level."""


def check_depth(value: Any) -> None:
    """Raise ValueError if plain values are nested too deeply."""
    level = [[value]]
    for _ in range(_MOST_LEVELS):
        level = [item for holder in level for item in _items(holder)]
        if not level:
            return
    raise ValueError(f"it is nested more than {_MOST_LEVELS} levels deep")


def _items(holder: Any) -> Iterable[Any]:
    """The items of a list or dict that are lists or dicts themselves."""
    items = holder.values() if isinstance(holder, dict) else holder
    return [item for item in items if isinstance(item, dict | list)]


class Noun:
    """Base of the dataclasses that are stored and printed."""

    __slots__ = ()

    def to_json(self, enums: Callable[[IntEnum], str | int] = str) -> dict[str, Any]:
        """The fields as plain values, enums as words; run directories store them as numbers, with `enums=int`.

        Numbers that are not finite stay floats, so `json` writes them as NaN and Infinity.
        """
        return {name: _plain(getattr(self, name), enums) for name in _fields(cast(Any, type(self)))}

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> Self:
        """The inverse of `to_json`. Missing fields get their default, unknown ones are ignored.

        Raises ValueError if a value does not have the type of its field.
        """
        noun: Self = _read(plain, cls, cls.__name__)
        return noun


def _plain(value: Any, enums: Callable[[IntEnum], str | int]) -> Any:
    if isinstance(value, IntEnum):
        return enums(value)
    if isinstance(value, Noun):
        return value.to_json(enums)
    if isinstance(value, Mapping):
        return {key: _plain(item, enums) for key, item in value.items()}
    return [_plain(item, enums) for item in value] if isinstance(value, list | tuple) else value


def _read(value: Any, kind: Any, name: str) -> Any:
    """A plain value converted to the type of the field `name`."""
    if kind in _PLAIN:  # most values are plain
        if isinstance(value, _PLAIN[kind]):
            return value
        raise _unexpected(value, kind, name)
    origin, kinds = get_origin(kind), get_args(kind)
    if origin is UnionType:
        if NoneType in kinds:
            return None if value is None else _read(value, kinds[0], name)
        return value if isinstance(value, Real | str) else str(value)  # a number or a word
    if origin is Mapping and isinstance(value, Mapping):
        return {key: _read(item, kinds[1], name) for key, item in value.items()}
    if origin is tuple and isinstance(value, list | tuple) and (kinds[-1] is ... or len(kinds) == len(value)):
        return tuple([_read(item, kinds[0], name) for item in value])
    if origin is not None:
        raise _unexpected(value, origin, name)
    if issubclass(kind, Noun):
        if not isinstance(value, Mapping):
            raise _unexpected(value, dict, name)
        fields = _fields(cast(Any, kind)).items()
        return kind(**{
            field: _read(value.get(field), of_field, field)
            for field, (of_field, is_needed) in fields if is_needed or field in value
        })  # fmt: skip
    try:
        return kind[value.upper()] if isinstance(value, str) else kind(value)
    except (KeyError, ValueError):
        raise ValueError(f"{name} has the unknown value {value!r:.80}: it is damaged or from a newer version") from None


_PLAIN: dict[Any, Any] = {Any: object, str: str, bool: bool, int: Integral, float: Real}
"""The types accepted for each kind of plain value; an integer is also accepted as a float."""


def _unexpected(value: Any, kind: type, name: str) -> ValueError:
    return ValueError(f"{name} must be {kind.__name__}, not {value!r:.80}")


@functools.cache
def _fields(kind: type) -> dict[str, tuple[Any, bool]]:
    """The type of each field of a dataclass, and whether it is required."""
    kinds, missing = get_type_hints(kind), dataclasses.MISSING
    return {
        field.name: (kinds[field.name], field.default is missing and field.default_factory is missing)
        for field in dataclasses.fields(kind)
    }
