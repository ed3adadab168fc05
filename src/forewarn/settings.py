"""What a settings class is: a dataclass that checks its values when it is made, and reads them from plain mappings."""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import UnionType
from typing import Any, Literal, Self, get_args, get_origin, get_type_hints

Counted = Literal["steps", "readings", "epochs"]
"""What a number counts: a metric that is read every tenth step has one reading where others have ten."""


def between(default: Any, low: float, high: float = math.inf, *, counts: Counted | None = None) -> Any:
    """A numeric field that must lie in [low, high]; one that is a length of time says in what it `counts`."""
    return field(default=default, metadata={"low": low, "high": high, "counts": counts})


def pattern(default: str = "") -> Any:
    """A field that holds a regular expression."""
    return field(default=default, metadata={"pattern": True})


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Base of every settings class: values are checked when they are made, and can be read from plain mappings."""

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for each in dataclasses.fields(self):
            _check(type(self), each, hints[each.name], getattr(self, each.name))

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any], where: str = "") -> Self:
        """Settings from a plain mapping, as TOML gives it; what is not named keeps its default."""
        hints = get_type_hints(cls)
        made: dict[str, Any] = {}
        for name, value in plain.items():
            spot = f"{where}.{name}" if where else name
            if name not in hints:
                close = difflib.get_close_matches(name, hints, n=1)
                hint = f"; did you mean {close[0]!r}?" if close else f"; known are {', '.join(sorted(hints))}"
                raise ValueError(f"unknown setting {spot!r}{hint}")
            kind = hints[name]
            if isinstance(kind, type) and issubclass(kind, Settings):
                if not isinstance(value, Mapping):
                    raise TypeError(f"setting {spot!r} is a table of settings, not {value!r}")
                made[name] = kind.from_dict(value, spot)
            else:
                made[name] = tuple(value) if isinstance(value, list) else value
        return cls(**made)

    def to_dict(self) -> dict[str, Any]:
        """The settings as plain values, fit for JSON."""
        return dataclasses.asdict(self)


def _check(owner: type, each: dataclasses.Field[Any], kind: Any, value: Any) -> None:
    name = f"{owner.__name__}.{each.name}"
    if get_origin(kind) is UnionType:  # a value that may be None
        if value is None:
            return
        kind = get_args(kind)[0]
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise ValueError(f"{name} must be one of {', '.join(get_args(kind))}, not {value!r}")
    elif kind in (int, float, bool):
        numeric = isinstance(value, int | float) and not isinstance(value, bool)
        fits = isinstance(value, bool) if kind is bool else numeric and (kind is float or isinstance(value, int))
        if not fits:
            raise TypeError(f"{name} must be {kind.__name__}, not {value!r}")
    elif get_origin(kind) is tuple:
        if not isinstance(value, tuple) or not all(isinstance(each, str) for each in value):
            raise TypeError(f"{name} must be a tuple of strings, not {value!r}")
    elif not isinstance(value, get_origin(kind) or kind):
        raise TypeError(f"{name} must be a {(get_origin(kind) or kind).__name__}, not {value!r}")
    if each.metadata.get("pattern"):
        try:
            re.compile(value)
        except re.error as error:
            raise ValueError(f"{name} must be a regular expression, but {value!r} is none: {error}") from error
    low, high = each.metadata.get("low", -math.inf), each.metadata.get("high", math.inf)
    if kind in (int, float) and not low <= value <= high:
        bounds = f"at least {low:g}" if high == math.inf else f"between {low:g} and {high:g}"
        raise ValueError(f"{name} must be {bounds}, not {value!r}")
