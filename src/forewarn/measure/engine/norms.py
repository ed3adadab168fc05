"""Norms of many tensors, one by one and together."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from forewarn.measure.engine import native
from forewarn.measure.engine.portable import dense_values
from forewarn.measure.engine.statistics import COLUMNS

Norm = Tensor | float
"""A number on a device, or already on the host."""

_SQUARES, _NONFINITE = COLUMNS.index("sum_squares"), COLUMNS.index("nonfinite")


class NormReader:
    """Reads the norms of the same kind of tensors again and again, such as the gradients of every step."""

    def __init__(self) -> None:
        self._rows = native.RowReader() if native.available() else None

    def __call__(self, tensors: Sequence[Tensor]) -> list[Norm]:
        """The 2-norm of each tensor, none of which is empty; not finite where a value is not."""
        rows = None if self._rows is None else self._rows(tensors)
        if rows is None or any(rows[_NONFINITE :: len(COLUMNS)]):
            return norms(tensors)
        return list(map(math.sqrt, rows[_SQUARES :: len(COLUMNS)]))


def norms(tensors: Sequence[Tensor]) -> list[Norm]:
    """The 2-norm of each tensor, none of which is empty; not finite where a value is not."""
    if native.available() and (described := native.described(tensors)) is not None:
        rows, _, _ = native.measure(described)
        if not rows[:, _NONFINITE].any():
            result: list[Norm] = np.sqrt(rows[:, _SQUARES]).tolist()
            return result
    values = [dense_values(tensor) for tensor in tensors]
    if not values:
        return []
    double = any(tensor.dtype is torch.float64 for tensor in values)
    return list(torch._foreach_norm(values, 2, dtype=torch.float64 if double else torch.float32))


def norm_of_all(parts: Sequence[Norm]) -> Norm:
    """The norm of several parts from their norms, on the device of the first that is on one."""
    is_on_host = set(map(type, parts)) <= {float}
    on_devices = [] if is_on_host else [part for part in parts if isinstance(part, Tensor)]
    if not on_devices:
        return math.hypot(*parts)
    if on_host := math.hypot(*(part for part in parts if not isinstance(part, Tensor))):
        on_devices.append(torch.tensor(on_host, dtype=on_devices[0].dtype))
    if len(on_devices) == 1:
        return on_devices[0]
    total: Tensor = torch.linalg.vector_norm(torch.stack([part.to(on_devices[0].device) for part in on_devices]))
    return total
