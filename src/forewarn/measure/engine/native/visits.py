"""Rows and histograms of many tensors."""

from __future__ import annotations

import ctypes
from array import array
from collections import deque
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forewarn.measure.engine.native.library import check, library, path_number
from forewarn.measure.engine.native.tensors import KINDS, Described, dtype_of, is_on_the_host, owned
from forewarn.measure.engine.statistics import COLUMNS, NUM_BINS

_ROWS_AT_ONCE = 64

Measured = tuple[NDArray[np.float64], NDArray[np.int64] | None, NDArray[np.int64] | None]


def measure(
    tensors: Sequence[Tensor],
    histogram_blocks: int = 0,
    threads: int | None = None,
    path: str | None = None,
) -> Measured:
    """The rows [n × columns] of tensors that `supports` accepts and, on request, their histograms.

    With `histogram_blocks`, histograms [n × 2 × bins] count values by sign and by the power of two of their magnitude.
    They count up to that many evenly spaced blocks of 4096 values per tensor, or one block in 16 if that is more. The
    last array holds the number of elements of each tensor in these blocks. `threads` defaults to torch's own number,
    `path` to the best of `paths()`.
    """
    if histogram_blocks < 0:
        raise ValueError(f"histogram_blocks must be a number of blocks per tensor, 0 for none, not {histogram_blocks}")
    described = Described.of(tensors)
    num = len(tensors)
    rows = np.empty((num, len(COLUMNS)))
    histograms = np.empty((num, 2, NUM_BINS), np.int64) if histogram_blocks else None
    covered = np.empty(num, np.int64) if histogram_blocks else None
    check(
        library().forewarn_measure(
            *described.arguments,
            histogram_blocks,
            torch.get_num_threads() if threads is None else threads,
            path_number(path),
            rows.ctypes.data,
            None if histograms is None else histograms.ctypes.data,
            None if covered is None else covered.ctypes.data,
        )
    )
    return rows, histograms, covered


class RowReader:
    """Reads the rows of tensors again and again; as long as their lengths and kinds stay, little is prepared anew."""

    def __init__(self) -> None:
        self._lengths: list[int] = []
        self._dtypes: list[torch.dtype] = []
        self._table = (array("q"), array("B"), array("d"))
        """The lengths and kinds of the tensors, and the place for their rows."""
        self._addresses = (0, 0, 0)
        self._measure = library().forewarn_measure

    def __call__(self, tensors: Sequence[Tensor]) -> array[float] | None:
        """The rows one after another, to be used before the next call; None if a tensor is not supported."""
        if not owned(tensors) or not all(map(is_on_the_host, tensors)):
            return None
        try:
            pointers = array("Q", map(Tensor.data_ptr, tensors))
            if not all(pointers) or not all(map(Tensor.is_contiguous, tensors)):
                return None
        except RuntimeError:  # no address
            return None
        lengths, dtypes = list(map(Tensor.numel, tensors)), list(map(dtype_of, tensors))
        if lengths != self._lengths or dtypes != self._dtypes:
            if not all(dtype in KINDS for dtype in dtypes):
                return None
            sizes, kinds = array("q", lengths), array("B", map(KINDS.__getitem__, dtypes))
            rows = array("d", bytes(8 * len(COLUMNS) * len(lengths)))
            self._table = sizes, kinds, rows
            self._lengths, self._dtypes = lengths, dtypes
            self._addresses = sizes.buffer_info()[0], kinds.buffer_info()[0], rows.buffer_info()[0]
        lengths_at, kinds_at, rows_at = self._addresses
        place, threads = pointers.buffer_info()[0], torch.get_num_threads()
        check(self._measure(len(tensors), place, lengths_at, kinds_at, 0, threads, 0, rows_at, None, None))
        return self._table[2]


class _One(ctypes.Structure):
    """A table of one tensor, its columns one after another."""

    _fields_ = (("pointer", ctypes.c_uint64), ("length", ctypes.c_int64), ("kind", ctypes.c_uint8))


_LENGTH, _KIND = _One.length.offset, _One.kind.offset

_free_rows: deque[tuple[NDArray[np.float64], int]] = deque()
"""Rows [1 × columns] that nobody has used yet, and their addresses, which are slow to look up one by one."""


def measure_one(tensor: Tensor) -> NDArray[np.float64]:
    """The row [1 × columns] of one tensor that `supports` accepts: the same numbers at a tenth of the overhead."""
    table = _One(tensor.data_ptr(), tensor.numel(), KINDS[tensor.dtype])
    address = ctypes.addressof(table)
    row, place = _free_row()
    check(
        library().forewarn_measure(
            1, address, address + _LENGTH, address + _KIND, 0, torch.get_num_threads(), 0, place, None, None
        )
    )
    return row


def _free_row() -> tuple[NDArray[np.float64], int]:
    try:
        return _free_rows.pop()
    except IndexError:
        rows = np.empty((_ROWS_AT_ONCE, 1, len(COLUMNS)))
        first, size = rows.ctypes.data, rows[0].nbytes
        _free_rows.extend((row, first + index * size) for index, row in enumerate(rows))
        return _free_rows.pop()
