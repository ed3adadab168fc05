"""Exact percentiles of tensors by sorting: many times the cost of a histogram, so only on request."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from forewarn.measure.engine.portable import dense_values, num_elements


def exact_percentiles(tensors: Sequence[Tensor | None], percents: Sequence[int]) -> tuple[list[int], list[Tensor]]:
    """Which tensor each row belongs to, and rows [n × percents] in double precision, one part per device.

    A percentile is the ⌈p · n⌉-th smallest of the n finite values, NaN if there are none. A None tensor has no row.
    """
    parts: dict[torch.device, list[int]] = {}
    rows: dict[int, Tensor] = {}
    for index, tensor in enumerate(tensors):
        if tensor is not None:
            rows[index] = _percentiles(_all_values(tensor), percents)
            parts.setdefault(rows[index].device, []).append(index)
    order = [index for indices in parts.values() for index in indices]
    return order, [torch.stack([rows[index] for index in indices]) for indices in parts.values()]


def _all_values(tensor: Tensor) -> Tensor:
    """The values of a tensor in one row, including the zeros that a sparse tensor does not store."""
    values = dense_values(tensor).reshape(-1)
    absent = num_elements(tensor) - values.numel()
    return torch.cat([values, values.new_zeros(absent)]) if absent else values


def _percentiles(values: Tensor, percents: Sequence[int]) -> Tensor:
    if not values.numel():
        return values.new_full((len(percents),), torch.nan, dtype=torch.float64)
    finite = values.isfinite()
    ordered = values.where(finite, torch.inf).sort().values
    count = finite.sum()
    ranks = (count * torch.tensor(percents, device=values.device) + 99) // 100
    return ordered[(ranks - 1).clamp(min=0)].double().where(count > 0, torch.nan)
