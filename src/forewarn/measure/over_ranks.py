"""How the numbers that several ranks measured become one: packed into one vector of sums and one of maxima."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from forewarn.measure.engine.statistics import COLUMNS

Array = NDArray[np.float64]

_NONFINITE = COLUMNS.index("nonfinite")
_LEAST, _MOST = COLUMNS.index("min"), COLUMNS.index("max")
_SUMS_OF_A_HEAD = [0, 1, 3]
_LARGEST_LOGIT = 2


class How(StrEnum):
    """How one array is combined over the ranks."""

    OWN = "own"
    """It is not exchanged: equal on all ranks, or only the value of the recording rank counts."""
    SUM = "sum"
    MEAN = "mean"
    """The mean over the ranks that have it."""
    L2 = "l2"
    """The square root of the sum of squares: norms of parts become the norm of the whole."""
    MIN = "min"
    MAX = "max"
    ROWS = "rows"
    """Rows of the statistics engine: they add up, except for min and max. A row of NaN is absent."""
    HEADS = "heads"
    """The sums of attention heads, of which the largest logit is a maximum."""
    TARGETS = "targets"
    """Number of targets, which adds up, number of classes, of which the largest counts, a class of this rank, and
    numbers of each class, which add up."""
    EACH = "each"
    """The vector of every rank, as one row of a matrix [ranks × values]."""


class Part(NamedTuple):
    """How an array of a reading is combined, and what tells it from others of the same probe."""

    how: How
    label: str = ""
    is_sharded: bool = False
    """Whether the array describes a part of the model's tensors, and is wrong without the parts of other ranks."""
    once: bool = False
    """Whether ranks that train on the same batch, as with tensor parallelism, count as one."""
    each: bool = False
    """Whether `Step.each_rank` also has what each rank alone says about it: see `summary`."""


OWN = Part(How.OWN)


def summary(how: How, array: Array) -> Array:
    """One number about an array: the number itself, the first row with a non-finite value, or a checksum."""
    if how is How.ROWS:
        rows = np.flatnonzero(array[:, _NONFINITE] > 0)
        return np.array([float(rows[0]) if len(rows) else -1.0])
    if how is How.MIN:
        return np.array([float(zlib.crc32(np.ascontiguousarray(array).tobytes()))])
    return array.reshape(1)


def in_place(array: Array, part: tuple[int, int], neutral: float | Array = 0.0) -> Array:
    """The columns of this rank among those of all that hold others: at its place, between neutral ones."""
    place, num_parts = part
    width = array.shape[-1]
    placed = np.full((*array.shape[:-1], num_parts * width), neutral)
    placed[..., place * width : (place + 1) * width] = array
    return placed


class Entry(NamedTuple):
    """An array with a name that is the same on all ranks."""

    key: str
    part: Part
    array: Array

    def without_values(self) -> Entry:
        """The same, of a rank that has nothing to add."""
        return self._replace(array=np.full_like(self.array, np.nan if self.part.how is How.ROWS else 0.0))


class Layout:
    """The order and shape of the arrays that are exchanged in one step."""

    def __init__(self, keys: Sequence[str]) -> None:
        self.keys = tuple(keys)
        self.text = "\n".join(self.keys).encode(errors="replace")
        self.mark = float(zlib.crc32(self.text))
        """Equal on two ranks if their layouts are."""

    @classmethod
    def of(cls, entries: Sequence[Entry]) -> Layout:
        return cls([entry.key for entry in entries])

    @classmethod
    def read(cls, text: bytes) -> Layout:
        return cls(text.decode(errors="replace").split("\n") if text else ())


def key_of(probe: str, index: int, part: Part, array: Array) -> str:
    """The name of an array: two ranks combine arrays of the same name, so it includes their shape."""
    return f"{probe} {part.label or index} {part.how} {'x'.join(map(str, array.shape))}".replace("\n", " ")


def pack(entries: Sequence[Entry], rank: int, num_ranks: int, is_twin: bool = False) -> tuple[Array, Array]:
    """The numbers to add up over the ranks, and those to take the maximum of.

    A twin trains on the same batch as another rank.
    """
    sums: list[Array] = [np.empty(0)]
    most: list[Array] = [np.empty(0)]
    for _, (how, _, _, once, *_), array in entries:
        weight = 0.0 if once and is_twin else 1.0
        match how:
            case How.SUM:
                sums.append(weight * array.ravel())
            case How.MEAN:
                sums += [array.ravel(), np.ones(1)]
            case How.L2:
                sums.append(np.square(array).ravel())
            case How.MIN:
                most.append(_without_nan(-array).ravel())
            case How.MAX:
                most.append(_without_nan(array).ravel())
            case How.ROWS:
                present = ~np.isnan(array[:, 0])
                rows = np.where(present[:, None], array, _neutral_row(array.shape[1]))
                most += [-rows[:, _LEAST], rows[:, _MOST].copy()]
                rows[:, _LEAST], rows[:, _MOST] = present, 0.0
                sums.append(rows.ravel())
            case How.HEADS:
                sums.append(array[_SUMS_OF_A_HEAD].ravel())
                most.append(_without_nan(array[_LARGEST_LOGIT]))
            case How.TARGETS:
                sums += [weight * array[:1], weight * array[3:]]
                most.append(array[1:2])
            case How.EACH:
                matrix = np.zeros((num_ranks, array.size))
                matrix[rank] = array.ravel()
                sums.append(matrix.ravel())
    return np.concatenate(sums), np.concatenate(most)


def unpack(entries: Sequence[Entry], sums: Array, most: Array, num_ranks: int) -> list[Array]:
    """The arrays over all ranks, in the order of the entries."""
    added, largest = _Reader(sums), _Reader(most)
    arrays: list[Array] = []
    for _, (how, *_), array in entries:
        match how:
            case How.SUM:
                combined = added.take(array.size)
            case How.MEAN:
                total = added.take(array.size)
                combined = total / added.take(1)
            case How.L2:
                combined = np.sqrt(added.take(array.size))
            case How.MIN:
                combined = -_with_nan(largest.take(array.size))
            case How.MAX:
                combined = _with_nan(largest.take(array.size))
            case How.ROWS:
                least, greatest = -largest.take(len(array)), largest.take(len(array))
                rows = added.take(array.size).reshape(array.shape).copy()
                absent = rows[:, _LEAST] == 0
                rows[:, _LEAST], rows[:, _MOST] = least, greatest
                rows[absent] = np.nan
                combined = rows
            case How.HEADS:
                combined = np.empty(array.shape)
                combined[_SUMS_OF_A_HEAD] = added.take(3 * array.shape[1]).reshape(3, -1)
                combined[_LARGEST_LOGIT] = _with_nan(largest.take(array.shape[1]))
                combined[_LARGEST_LOGIT, np.isnan(combined[0])] = np.nan  # a rank has NaN, which the maximum ignores
            case How.TARGETS:
                combined = np.concatenate([added.take(1), largest.take(1), array[2:3], added.take(len(array) - 3)])
            case How.EACH:
                combined = added.take(num_ranks * array.size).reshape(num_ranks, array.size)
            case _:
                raise ValueError(f"{how} is not exchanged")
        arrays.append(combined if how is How.EACH else combined.reshape(array.shape))
    return arrays


class _Reader:
    """Takes parts from the front of a vector."""

    def __init__(self, vector: Array) -> None:
        self._vector = vector
        self._start = 0

    def take(self, size: int) -> Array:
        part = self._vector[self._start : self._start + size]
        self._start += size
        return part


def _neutral_row(num_columns: int) -> Array:
    row = np.zeros(num_columns)
    row[_LEAST], row[_MOST] = np.inf, -np.inf
    return row


def _without_nan(array: Array) -> Array:
    """A maximum ignores NaN: how libraries compare it differs."""
    return np.where(np.isnan(array), -np.inf, array)


def _with_nan(array: Array) -> Array:
    return np.where(np.isneginf(array), np.nan, array)
