"""Adds statistics of a layer's output to a tally in one call of a few microseconds."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from forewarn.measure.engine.native.library import check, library, path_number
from forewarn.measure.engine.native.tensors import KINDS


class _Tally(ctypes.Structure):
    """`Tally` of interface.h."""

    _fields_ = (
        ("row", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("look", ctypes.c_int64),
        ("low", ctypes.c_double),
        ("high", ctypes.c_double),
        ("fired", ctypes.c_void_p),
        ("sums", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("outer", "units", "inner", "every", "dtype", "path")),
    )


class NativeTally:
    """The arrays in which the library adds up one output of a layer, kept alive, and their addresses."""

    __slots__ = ("_add", "_address", "_arrays", "_made")

    def __init__(
        self,
        look: int,
        low: float,
        high: float,
        row: NDArray[np.float64],
        positions: NDArray[np.int64],
        fired: NDArray[np.uint8],
        sums: NDArray[np.float64],
    ) -> None:
        self._arrays = (row, positions, fired, sums)
        addresses = [array.ctypes.data for array in self._arrays]
        self._made = _Tally(*addresses[:2], look, low, high, *addresses[2:])
        self._address = ctypes.addressof(self._made)
        self._add: Callable[[int, int], int] | None = None

    def prepare(self, layout: Sequence[int], dtype: torch.dtype, path: str | None = None) -> None:
        """Expect contiguous tensors of this [outer × units × inner], of which every nth row is read."""
        made = self._made
        made.outer, made.units, made.inner, made.every = layout
        made.dtype, made.path = KINDS[dtype], path_number(path)
        self._add = library().forewarn_add_layer

    def add(self, address: int) -> None:
        """Add the tensor at an address."""
        assert self._add is not None
        if status := self._add(self._address, address):
            check(status)
