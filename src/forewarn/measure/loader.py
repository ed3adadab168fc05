"""A data loader that measures how long the loop waits for each batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from forewarn.measure.stopwatch import UPDATE_ENDED, WAITING_FOR_DATA, Stopwatch


class WatchedLoader:
    """Behaves like the loader, or the iterator, that it holds: attributes, type, state and exceptions are its own.

    Copies and pickles are those of the loader itself.
    """

    __slots__ = ("_held", "_stopwatch")

    def __init__(self, held: Any, stopwatch: Stopwatch) -> None:
        object.__setattr__(self, "_held", held)
        object.__setattr__(self, "_stopwatch", stopwatch)

    def __iter__(self) -> Any:
        held, stopwatch = _parts(self)
        stopwatch.begin(WAITING_FOR_DATA)  # workers start here
        try:
            iterator = iter(held)
        finally:
            stopwatch.begin(UPDATE_ENDED)
        return self if iterator is held else watched(iterator, stopwatch)

    def __next__(self) -> Any:
        held, stopwatch = _parts(self)
        stopwatch.begin(WAITING_FOR_DATA)
        try:
            return next(held)
        finally:
            stopwatch.begin(UPDATE_ENDED)

    def __getattr__(self, name: str) -> Any:
        return getattr(_parts(self)[0], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(_parts(self)[0], name, value)

    def __delattr__(self, name: str) -> None:
        delattr(_parts(self)[0], name)

    def __dir__(self) -> list[str]:
        return dir(_parts(self)[0])

    def __repr__(self) -> str:
        return repr(_parts(self)[0])

    def __reduce__(self) -> Any:
        return _itself, (_parts(self)[0],)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.__reduce__()

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(_parts(self)[0])


_LOOKED_UP_ON_THE_TYPE = ("__len__", "__getitem__", "__contains__")
"""Methods of a loader, or of a list of batches, that `__getattr__` cannot pass on."""


@lru_cache(maxsize=32)
def _class_for(methods: tuple[str, ...]) -> type[WatchedLoader]:
    """The class of a watched loader that has these methods, which its own would not show."""

    def passed_on(name: str) -> Callable[..., Any]:
        return lambda self, *args: getattr(_parts(self)[0], name)(*args)

    return type("WatchedLoader", (WatchedLoader,), {"__slots__": (), **{name: passed_on(name) for name in methods}})


def watched(loader: Any, stopwatch: Stopwatch) -> Any:
    """The loader, watched; it has a length, and can be indexed, if the loader can."""
    methods = tuple(name for name in _LOOKED_UP_ON_THE_TYPE if hasattr(type(loader), name))
    return _class_for(methods)(loader, stopwatch)


def _parts(watched: Any) -> tuple[Any, Stopwatch]:
    return object.__getattribute__(watched, "_held"), object.__getattribute__(watched, "_stopwatch")


def _itself(loader: Any) -> Any:
    return loader
