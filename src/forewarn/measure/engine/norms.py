"""The norm of each of many tensors, and of all of them together."""

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
"""A number on a device, or one that is here already."""

_SQUARES, _NONFINITE = COLUMNS.index("sum_squares"), COLUMNS.index("nonfinite")


def norms(tensors: Sequence[Tensor]) -> list[Norm]:
    """The 2-norm of each tensor, none of which is empty; not finite where a value is not."""
    if native.available() and (whole := native.described(tensors)) is not None:
        rows, _, _ = native.measure(whole)
        if not rows[:, _NONFINITE].any():
            found: list[Norm] = np.sqrt(rows[:, _SQUARES]).tolist()
            return found
    values = [dense_values(each) for each in tensors]
    if not values:
        return []
    double = any(each.dtype is torch.float64 for each in values)
    return list(torch._foreach_norm(values, 2, dtype=torch.float64 if double else torch.float32))


def norm_of_all(parts: Sequence[Norm]) -> Norm:
    """The norm of several parts from their norms, on the device of the first that is on one."""
    here = math.hypot(*(part for part in parts if not isinstance(part, Tensor)))
    there = [part for part in parts if isinstance(part, Tensor)]
    if not there:
        return here
    if here:
        there.append(torch.tensor(here, dtype=there[0].dtype))
    if len(there) == 1:
        return there[0]
    total: Tensor = torch.linalg.vector_norm(torch.stack([part.to(there[0].device) for part in there]))
    return total
