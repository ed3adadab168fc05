"""What is known of the tensors behind scopes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from forewarn.judge.series import Bools, Floats
from forewarn.types import RunInfo

T = TypeVar("T")


def is_matrix(scopes: tuple[str, ...], info: RunInfo) -> Bools:
    """Which tensors have two dimensions or more, or are not known: all but biases, weights of norms, scalars.

    Vectors often start at zero, and some have no gradient by construction (a bias before a batch norm, the bias of
    attention keys), so what is a fault in a matrix is nothing there.
    """
    return _is_matrix(_Same(info), _Same(scopes))


def matrices(where: Bools, scopes: tuple[str, ...], info: RunInfo) -> Iterator[int]:
    """The places that are marked and hold a matrix."""
    return (int(at) for at in np.flatnonzero(where & is_matrix(scopes, info))) if where.any() else iter(())


def hold_matrices(blocks: tuple[str, ...], info: RunInfo) -> Bools:
    """Which blocks have a parameter of two dimensions or more; those of which nothing is known do."""
    return _hold_matrices(_Same(info), _Same(blocks))


@dataclass(frozen=True, slots=True)
class Kinds:
    """Matrices of the same kind side by side."""

    members: tuple[NDArray[np.intp], ...]
    """For each kind, where its tensors are among the scopes."""
    root_counts: Floats
    """The square root of the number of elements, by scope: norm over this is the root mean square."""


def kinds(scopes: tuple[str, ...], info: RunInfo, at_least: int) -> Kinds:
    """The kinds that have at least so many matrices."""
    return _kinds(_Same(info), _Same(scopes), at_least)


class _Same(Generic[T]):
    """Run information or scopes compared by identity: they stay the same throughout a run, and by value is slow."""

    def __init__(self, value: T) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value


@lru_cache(maxsize=16)
def _is_matrix(info: _Same[RunInfo], scopes: _Same[tuple[str, ...]]) -> Bools:
    shapes = (known.shape if (known := info.value.parameters.get(scope)) else None for scope in scopes.value)
    return np.array([shape is None or len(shape) >= 2 for shape in shapes], np.bool_)


@lru_cache(maxsize=16)
def _hold_matrices(info: _Same[RunInfo], blocks: _Same[tuple[str, ...]]) -> Bools:
    dimensions: dict[str, int] = {}
    for name, known in info.value.parameters.items():
        for block in (each for each in blocks.value if name.startswith(f"{each}.")):
            dimensions[block] = max(dimensions.get(block, 0), len(known.shape))
    return np.array([dimensions.get(block, 2) > 1 for block in blocks.value], np.bool_)


@lru_cache(maxsize=16)
def _kinds(info: _Same[RunInfo], scopes: _Same[tuple[str, ...]], at_least: int) -> Kinds:
    members: dict[str, list[int]] = {}
    counts = np.ones(len(scopes.value))
    for at, scope in enumerate(scopes.value):
        known = info.value.parameters.get(scope)
        if known is not None and len(known.shape) >= 2:
            members.setdefault(known.kind, []).append(at)
            counts[at] = max(1, np.prod(known.shape, dtype=np.float64))
    enough = tuple(np.array(each, np.intp) for each in members.values() if len(each) >= at_least)
    return Kinds(enough, np.sqrt(counts))
