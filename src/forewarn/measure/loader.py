"""A data loader that measures how long the loop waits for each batch."""

from __future__ import annotations

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


class _SizedLoader(WatchedLoader):
    __slots__ = ()

    def __len__(self) -> int:
        return len(_parts(self)[0])


def watched(loader: Any, stopwatch: Stopwatch) -> Any:
    """The loader, watched; it has a length if the loader has one."""
    return (_SizedLoader if hasattr(type(loader), "__len__") else WatchedLoader)(loader, stopwatch)


def _parts(watched: Any) -> tuple[Any, Stopwatch]:
    return object.__getattribute__(watched, "_held"), object.__getattribute__(watched, "_stopwatch")


def _itself(loader: Any) -> Any:
    return loader
