"""The output of every statistics backend: rows of sums, and histograms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forewarn.histograms import LOWEST_EXPONENT, NUM_BINS

__all__ = ["ALL_BLOCKS", "COLUMNS", "LOWEST_EXPONENT", "NUM_BINS", "Measurement", "Numbers"]

ALL_BLOCKS = 1 << 40
"""More blocks of 4096 values than any tensor has: with it, a histogram counts all values."""

COLUMNS = ("count", "sum", "sum_squares", "min", "max", "zeros", "nonfinite")
"""The columns of a row: over the finite values, except `count` (all), `zeros` and `nonfinite` (the others)."""

MOMENTS = (*COLUMNS, "sum_cubes", "sum_fourths")
"""The columns for a layer's output: those of a tensor, and the sums that the shape of its distribution needs."""

Numbers = Tensor | NDArray[np.float64] | NDArray[np.int64]
Value = Numbers | float
"""Numbers, or one that is known already."""


NO_ROWS: NDArray[Any] = np.empty((0, len(COLUMNS)))


@dataclass(frozen=True, slots=True)
class Measurement:
    """Statistics of many tensors, still on their devices, one part per backend and device."""

    order: Sequence[int]
    """Which input each row belongs to, over all parts."""
    rows: tuple[Numbers, ...]
    """[n × columns] each, in double precision. Rows of parts of a tensor add up to the row of the whole."""
    histograms: tuple[Numbers, ...] = ()
    """[n × 2 × bins] each: counts of negative and of positive values by the power of two of their magnitude."""

    def in_one_piece(self) -> Measurement:
        """The same statistics as tensors in the order of the inputs, which is the same on all ranks."""
        if not len(self.order):
            return self
        back = torch.tensor(self.order).argsort()
        histograms = (_joined(self.histograms, back),) if self.histograms else ()
        return Measurement(range(len(self.order)), (_joined(self.rows, back),), histograms)


def _joined(parts: Sequence[Numbers], back: Tensor) -> Tensor:
    """Parts in one tensor, its rows in another order, on the device of the first part that is on one."""
    tensors = [part if isinstance(part, Tensor) else torch.from_numpy(part) for part in parts]
    home = next((tensor.device for tensor in tensors if not tensor.is_cpu), torch.device("cpu"))
    dtype = tensors[0].dtype
    return torch.cat([tensor.to(home, dtype) for tensor in tensors])[back.to(home)]


def in_order(order: Sequence[int], parts: Sequence[NDArray[Any]], none: NDArray[Any] = NO_ROWS) -> NDArray[Any]:
    """Rows from `measure`, put back in the order of its tensors; `none` if there are no rows."""
    straight = range(len(order))
    if len(parts) == 1 and (order == straight or list(order) == list(straight)):  # the usual case, and nothing to copy
        return parts[0]
    together = np.concatenate(parts) if parts else none
    rows = np.empty_like(together)
    rows[list(order)] = together
    return rows
