"""Adds statistics of a layer's output to a tally in one call of a few microseconds."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from forewarn.measure.engine.native.library import check, library, path_number
from forewarn.measure.engine.native.tensors import KINDS


class _Tally(ctypes.Structure):
    """`Tally` of interface.h."""

    _fields_ = (
        ("row", ctypes.c_void_p),
        ("look", ctypes.c_int64),
        ("low", ctypes.c_double),
        ("high", ctypes.c_double),
        ("fired", ctypes.c_void_p),
        ("sums", ctypes.c_void_p),
    )


class NativeTally:
    """The arrays in which the library adds up one output of a layer, kept alive, and their addresses."""

    __slots__ = ("_address", "_arrays", "_made")

    def __init__(
        self,
        look: int,
        low: float,
        high: float,
        row: NDArray[np.float64],
        fired: NDArray[np.uint8],
        sums: NDArray[np.float64],
    ) -> None:
        self._arrays = (row, fired, sums)
        self._made = _Tally(row.ctypes.data, look, low, high, fired.ctypes.data, sums.ctypes.data)
        self._address = ctypes.addressof(self._made)

    def add(self, tensor: Tensor, layout: Sequence[int], path: str | None = None) -> None:
        """Add a contiguous tensor; `layout` is its [outer × units × inner] and the stride of the rows to read."""
        kind, number = KINDS[tensor.dtype], path_number(path)
        status = library().forewarn_add_layer(self._address, tensor.data_ptr(), *layout, kind, number)
        if status:
            check(status)
