"""Settings classes: dataclasses that check their values when created, and read them from plain mappings."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import UnionType
from typing import Any, Literal, Self, get_args, get_origin, get_type_hints

Counted = Literal["steps", "readings", "epochs"]
"""What a number counts: a metric read every tenth step has one reading where others have ten."""


def between(default: Any, low: float, high: float = math.inf, *, counts: Counted | None = None) -> Any:
    """A numeric field that must lie in [low, high]. For a duration, `counts` is its unit."""
    return field(default=default, metadata={"low": low, "high": high, "counts": counts})


def pattern(default: str = "") -> Any:
    """A field that holds a regular expression."""
    return field(default=default, metadata={"pattern": True})


def secret() -> Any:
    """A list of strings that is never shown, in an error neither, and never stored."""
    return field(default=(), repr=False, metadata={"secret": True})


class _SignatureOfInit:
    """The signature for `help` and editors: the fields, which `Settings.__new__` would hide."""

    def __get__(self, instance: object, owner: Any) -> inspect.Signature:
        signature = inspect.signature(owner.__init__)
        parameters = list(signature.parameters.values())[1:]
        return signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Base of every settings class: checks its values when created, and can be read from plain mappings."""

    __signature__ = _SignatureOfInit()

    def __new__(cls, *values: Any, **settings: Any) -> Self:
        fields = {field.name: field.kw_only for field in dataclasses.fields(cls)}
        most = sum(not by_name for by_name in fields.values())
        if len(values) > most:
            only = f"at most {most} positional settings, not {len(values)}"
            by_name = f"its settings by name, as in {cls.__name__}({next(iter(fields))}=...)"
            raise TypeError(f"{cls.__name__} takes {only if most else by_name}")
        for name in settings:
            if name in cls._moved():
                raise TypeError(_new_place(name, cls._moved()[name]))
            if name not in fields:
                raise TypeError(f"{cls.__name__} has no setting {name!r}; {_hint(name, fields, cls._moved())}")
        return object.__new__(cls)

    @classmethod
    def _moved(cls) -> Mapping[str, str]:
        """Settings that were here in earlier versions, and their new place, such as `measure.sample_size`."""
        return {}

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for setting in dataclasses.fields(self):
            kind, value = hints[setting.name], getattr(self, setting.name)
            if get_origin(kind) in _SEQUENCES and isinstance(value, Sequence) and not isinstance(value, str):
                value = tuple(value)
                object.__setattr__(self, setting.name, value)  # the caller's list may change later
            _check(type(self), setting, kind, value)

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any], where: str = "") -> Self:
        """Settings from a plain mapping, such as parsed TOML; missing settings keep their default."""
        if not isinstance(plain, Mapping):
            raise TypeError(f"{cls.__name__}.from_dict expects a dict of settings, not {plain!r}")
        hints = get_type_hints(cls)
        values: dict[str, Any] = {}
        for name, value in plain.items():
            spot = f"{where}.{name}" if where else str(name)
            if name in cls._moved():
                raise ValueError(_new_place(spot, cls._moved()[name]))
            if name not in hints:
                raise ValueError(f"unknown setting {spot!r}; {_hint(name, hints, cls._moved())}")
            kind = hints[name]
            if get_origin(kind) is UnionType and isinstance(value, Mapping):
                kind = get_args(kind)[0]
            if isinstance(kind, type) and issubclass(kind, Settings) and not isinstance(value, kind):
                if not isinstance(value, Mapping):
                    raise TypeError(f"setting {spot!r} must be a table of settings, not {value!r}")
                value = kind.from_dict(value, spot)
            values[name] = value
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """The settings as plain values that JSON can store."""
        secrets = [setting.name for setting in dataclasses.fields(self) if setting.metadata.get("secret")]
        return {name: value for name, value in dataclasses.asdict(self).items() if name not in secrets}


_SEQUENCES = (Sequence, tuple)
"""Fields of these types hold strings: any sequence is accepted and stored as a tuple."""


def _hint(name: Any, names: Iterable[str], moved: Mapping[str, str]) -> str:
    """A suggestion for an unknown name."""
    names = sorted(names)
    close = difflib.get_close_matches(str(name), [*names, *moved], n=1)
    return f"did you mean {moved.get(close[0], close[0])!r}?" if close else f"choose from {', '.join(names)}"


def _new_place(name: str, place: str) -> str:
    return f"{name} moved to [{place.rpartition('.')[0]}]: write {place}"


def _check(owner: type, setting: dataclasses.Field[Any], kind: Any, value: Any) -> None:
    name = f"{owner.__name__}.{setting.name}"
    if get_origin(kind) is UnionType:  # a value that may be None
        if value is None:
            return
        kind = get_args(kind)[0]
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            hint = '; write "off"' if value is False and "off" in get_args(kind) else ""
            raise ValueError(f"{name} must be one of {', '.join(get_args(kind))}, not {value!r}{hint}")
    elif kind in (int, float, bool):
        numeric = isinstance(value, int | float) and not isinstance(value, bool)
        fits = isinstance(value, bool) if kind is bool else numeric and (kind is float or isinstance(value, int))
        if not fits:
            raise TypeError(f"{name} must be {kind.__name__}, not {value!r}")
    elif get_origin(kind) in _SEQUENCES:
        if not isinstance(value, tuple) or not all(isinstance(item, str) for item in value):
            given = type(value).__name__ if setting.metadata.get("secret") else repr(value)
            raise TypeError(f"{name} must be a list of strings, not {given}")
    elif isinstance(kind, type) and issubclass(kind, Settings) and isinstance(value, Mapping):
        raise TypeError(
            f"{name} must be a {kind.__name__}, not a dict; use {owner.__name__}.from_dict for nested dicts"
        )
    elif not isinstance(value, get_origin(kind) or kind):
        raise TypeError(f"{name} must be a {(get_origin(kind) or kind).__name__}, not {value!r}")
    if setting.metadata.get("pattern"):
        try:
            re.compile(value)
        except re.error as error:
            raise ValueError(f"{name} must be a regular expression, but {value!r} is not valid: {error}") from error
    low, high = setting.metadata.get("low", -math.inf), setting.metadata.get("high", math.inf)
    if kind in (int, float) and not low <= value <= high:
        bounds = f"at least {low:g}" if high == math.inf else f"between {low:g} and {high:g}"
        raise ValueError(f"{name} must be {bounds}, not {value!r}")
