"""Rows and histograms of many tensors."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forewarn.measure.engine.native.library import check, library, path_number
from forewarn.measure.engine.native.tensors import KINDS, Described
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
