"""Loading the C library: its path, its version and the arguments of its functions."""

from __future__ import annotations

import ctypes
import functools
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

INTERFACE_VERSION = 5
"""The same number as in interface.h: a library built from different sources is not used."""

_ERRORS: dict[int, tuple[type[Exception], str]] = {
    1: (MemoryError, "not enough memory for the table of tensors"),
    2: (ValueError, "this processor has no code path with that number"),
    3: (IndexError, "a sampled index lies outside its tensor"),
}
"""By the numbers in interface.h."""

_REBUILD = "install forewarn again (pip install --force-reinstall forewarn, or pip install -e . in its sources)"

_Int, _Long, _Address = ctypes.c_int, ctypes.c_int64, ctypes.c_void_p
_TENSORS: list[Any] = [_Long, _Address, _Address, _Address]


def available() -> bool:
    """Whether the library was built and can be used here."""
    return isinstance(_loaded(), ctypes.CDLL)


def why_not() -> str:
    """Why the library cannot be used; empty if it can."""
    loaded = _loaded()
    return loaded if isinstance(loaded, str) else ""


@functools.cache
def paths() -> tuple[str, ...]:
    """The code paths that this processor has, best first: they give the same numbers at different speeds."""
    names: list[str] = []
    while (name := library().forewarn_path_name(len(names))) is not None:
        names.append(name.decode())
    return tuple(names)


def path_number(path: str | None) -> int:
    """The library's number for a code path; by default the best one."""
    if path is not None and path not in paths():
        raise ValueError(f"this processor has no code path {path!r}; it has {', '.join(paths())}")
    return 0 if path is None else paths().index(path)


def library() -> ctypes.CDLL:
    """The functions of interface.h; raises if they are not available."""
    loaded = _loaded()
    if isinstance(loaded, str):
        raise RuntimeError(loaded)
    return loaded


def check(status: int) -> None:
    """Raise the error that a function of the library reported."""
    if status:
        kind, sentence = _ERRORS[status]
        raise kind(sentence)


@functools.cache
def _loaded() -> ctypes.CDLL | str:
    files = [path for suffix in EXTENSION_SUFFIXES if (path := Path(__file__).parent / f"_library{suffix}").exists()]
    if not files:
        return f"the native statistics were not built (is there a C compiler?): {_REBUILD}"
    try:
        loaded = ctypes.CDLL(str(files[0]))
        version = loaded.forewarn_interface_version()
    except (OSError, AttributeError) as error:
        return f"the native statistics in {files[0]} cannot be loaded ({error}): {_REBUILD}"
    if version != INTERFACE_VERSION:
        return f"the native statistics in {files[0]} belong to another version of forewarn: {_REBUILD}"
    loaded.forewarn_path_name.argtypes = [_Int]
    loaded.forewarn_path_name.restype = ctypes.c_char_p
    loaded.forewarn_measure.argtypes = [*_TENSORS, _Long, _Int, _Int, _Address, _Address, _Address]
    loaded.forewarn_gather.argtypes = [*_TENSORS, _Address, _Address, _Address]
    loaded.forewarn_gather_diff.argtypes = [*_TENSORS, _Address, _Address, _Address, _Int, _Address]
    loaded.forewarn_add_layer.argtypes = [_Address, _Address]
    loaded.forewarn_similarity.argtypes = [_Long, _Long, _Address, _Address]
    loaded.forewarn_spread.argtypes = [_Long, _Address, _Address, _Long, *[_Address] * 7]
    return loaded
