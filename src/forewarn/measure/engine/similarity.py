"""How alike the rows of a matrix are."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forewarn.measure.engine import native
from forewarn.measure.engine.native.library import check, library
from forewarn.measure.engine.statistics import Value

Rows = Tensor | NDArray[np.float64]


def joined(parts: list[Any]) -> Rows:
    """Rows one below another, all on one device or all in host memory."""
    if all(isinstance(part, np.ndarray) for part in parts):
        return np.concatenate(parts)
    return torch.cat([torch.from_numpy(part) if isinstance(part, np.ndarray) else part for part in parts])


def similarity(rows: Rows) -> tuple[Value, Value]:
    """The mean cosine over all pairs of rows, and the effective rank of their differences.

    The effective rank is the participation ratio (Σλ)² / Σλ² of the eigenvalues λ of the rows' covariance. It is k if
    rows differ equally in k directions, and 1 if they lie on a line or are all the same. No eigenvalue is computed.
    """
    if isinstance(rows, np.ndarray) and native.available():
        return _native(rows)
    return _by_torch(torch.from_numpy(rows) if isinstance(rows, np.ndarray) else rows)


def _native(rows: NDArray[np.float64]) -> tuple[float, float]:
    rows = np.ascontiguousarray(rows, np.float64)
    results = (ctypes.c_double * 2)()
    check(library().forewarn_similarity(*rows.shape, rows.ctypes.data, ctypes.addressof(results)))
    return results[0], results[1]


def _by_torch(rows: Tensor) -> tuple[Tensor, Tensor]:
    num = len(rows)
    units = rows / torch.linalg.vector_norm(rows, dim=1, keepdim=True).clamp(min=torch.finfo(rows.dtype).tiny)
    total = units.sum(dim=0)
    cosine = (torch.dot(total, total) - num) / (num * (num - 1))
    centred = rows - rows.mean(dim=0)
    gram = centred @ centred.T
    trace = gram.diagonal().sum()
    rank = trace.square() / gram.square().sum()
    # For identical rows, only rounding errors are left, whose rank means nothing.
    same = trace <= torch.finfo(rows.dtype).eps * torch.linalg.vector_norm(rows).square()
    return cosine, torch.where(same, 1.0, rank)
