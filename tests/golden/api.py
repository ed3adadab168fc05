"""The public names with their signatures, and every key of a config with its default, one per line."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import forewarn


def public_names() -> str:
    """Every name of `forewarn.__all__`; below a class stand its fields and its public methods."""
    lines: list[str] = []
    for name in sorted(forewarn.__all__):
        value = getattr(forewarn, name)
        if inspect.isclass(value):
            lines += [f"{_kind(value)} {name}", *(f"    {line}" for line in _members(value)), ""]
        elif callable(value):
            lines += [f"def {name}{_signature(value)}", ""]
        else:
            lines += [f"{name}: {type(value).__name__}", ""]
    return "\n".join(lines)


def config_keys() -> str:
    """`thresholds.loss_spike.k = 6.0`, as a TOML file names it."""
    return "".join(f"{key} = {json.dumps(value)}\n" for key, value in sorted(_flat(forewarn.Config().to_dict())))


def _kind(cls: type) -> str:
    if issubclass(cls, enum.Enum):
        return "enum"
    return "dataclass" if dataclasses.is_dataclass(cls) else "exception" if issubclass(cls, Exception) else "class"


def _members(cls: type) -> Iterator[str]:
    if issubclass(cls, enum.Enum):
        yield from (f"{member.name} = {member.value!r}" for member in cls)
    elif dataclasses.is_dataclass(cls):
        yield from (_field(field) for field in dataclasses.fields(cls))
    elif not issubclass(cls, Exception):
        yield f"__init__{_signature(cls)}"
    own = {name: value for base in reversed(cls.__mro__) if _is_ours(base) for name, value in vars(base).items()}
    fields = {field.name for field in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else set()
    for name in sorted(own.keys() - fields - (set(cls.__members__) if issubclass(cls, enum.Enum) else set())):
        if name.startswith("_") and name not in ("__call__", "__enter__", "__exit__", "__len__", "__iter__"):
            continue
        value = inspect.getattr_static(cls, name)
        if isinstance(value, property):
            yield f"{name}: property"
        elif callable(getattr(cls, name)):
            kind = "classmethod " if isinstance(value, classmethod) else ""
            kind = "staticmethod " if isinstance(value, staticmethod) else kind
            yield f"{kind}{name}{_signature(getattr(cls, name))}"
        else:
            yield _here(f"{name} = {value!r}" if isinstance(value, str | int | float | None) else name)


def _field(field: dataclasses.Field[Any]) -> str:
    kind = field.type if isinstance(field.type, str) else inspect.formatannotation(field.type)
    if field.default is not dataclasses.MISSING:
        default = f" = {field.default!r}"
    else:
        default = "" if field.default_factory is dataclasses.MISSING else " = …"
    keyword = "*, " if field.kw_only else ""
    return _here(f"{keyword}{field.name}: {kind}{default}")


class _Bare:
    """An annotation that is printed as it is written, whether it was evaluated or not."""

    def __init__(self, annotation: Any) -> None:
        annotation = getattr(annotation, "__forward_arg__", annotation)  # of a named tuple before Python 3.14
        self.text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)

    def __repr__(self) -> str:
        return self.text


def _signature(value: Any) -> str:
    signature = inspect.signature(value)
    parameters = [
        parameter.replace(annotation=_Bare(parameter.annotation))
        if parameter.annotation is not parameter.empty
        else parameter
        for parameter in signature.parameters.values()
    ]
    returns = signature.return_annotation
    returns = returns if returns is signature.empty else _Bare(returns)
    return _here(str(signature.replace(parameters=parameters, return_annotation=returns)))


def _here(text: str) -> str:
    """The text without what depends on files and memory: modules may move, and addresses do."""
    text = re.sub(r"Thresholds\(.*\)", "Thresholds(…)", text)
    return re.sub(r" at 0x[0-9a-f]+", "", re.sub(r"\bforewarn(\.\w+)+\.(?=\w)", "", text))


def _is_ours(cls: type) -> bool:
    return cls.__module__.partition(".")[0] == "forewarn"


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
