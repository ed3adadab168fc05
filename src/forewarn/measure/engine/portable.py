"""Statistics by plain torch operations: correct on every device and for every kind of tensor, without a host sync."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from forewarn.measure.engine.statistics import LOWEST_EXPONENT, NUM_BINS

_SMALL = 2048
"""Maximum size of tensors that are read together: below it, launching an operation costs more than reading."""


def wide(device: torch.device) -> torch.dtype:
    """The widest float of a device: float32 squares overflow near 1e20, and lose the spread of near-constants."""
    return torch.float32 if device.type == "mps" else torch.float64


def dense_values(tensor: Tensor) -> Tensor:
    """The real numbers that a tensor holds: a shard's own part, stored values if sparse, both parts if complex."""
    tensor = tensor.detach()
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_sparse_coo().coalesce().values()
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def measure(tensors: Sequence[Tensor], histogram: bool = False) -> tuple[Tensor, Tensor | None]:
    """Rows [n × columns] and histograms [n × 2 × bins] of tensors on one device, in their order."""
    values = [dense_values(tensor).reshape(-1) for tensor in tensors]
    absent = [num_elements(tensor) - stored.numel() for tensor, stored in zip(tensors, values, strict=True)]
    small = [index for index, flat in enumerate(values) if flat.numel() <= _SMALL]
    large = [index for index, flat in enumerate(values) if flat.numel() > _SMALL]
    precise = wide(values[0].device)
    parts = [_measure_together([values[index].to(precise) for index in small])] if small else []
    parts += [_measure_one(values[index].to(precise)) for index in large]
    back = torch.tensor([*small, *large], device=values[0].device).argsort()
    rows = _with_absent(torch.cat(parts)[back], absent)
    return rows, _histograms([flat.to(precise) for flat in values]) if histogram else None


def _measure_one(x: Tensor) -> Tensor:
    """The row of one flat tensor, by the cheapest operation for each column."""
    finite = x.isfinite()
    clean = x.where(finite, 0.0)
    count = x.numel()
    numbers = [
        x.new_tensor(count), clean.sum(), torch.dot(clean, clean),
        x.where(finite, float("inf")).amin(), x.where(finite, float("-inf")).amax(),
        count - torch.count_nonzero(x), count - torch.count_nonzero(finite),
    ]  # fmt: skip
    return torch.stack([number.to(x.dtype) for number in numbers]).unsqueeze(0)


def _measure_together(values: Sequence[Tensor]) -> Tensor:
    """The rows of many flat tensors, read as segments of one."""
    x = torch.cat(list(values))
    lengths = torch.tensor([flat.numel() for flat in values], device=x.device)
    finite = x.isfinite()
    clean = x.where(finite, 0.0)

    def reduced(numbers: Tensor, how: str, initial: float = 0.0) -> Tensor:
        segments: Tensor = torch.segment_reduce(numbers, how, lengths=lengths, unsafe=True, initial=initial)
        return segments

    columns = [
        lengths.to(x.dtype), reduced(clean, "sum"), reduced(clean * clean, "sum"),
        reduced(x.where(finite, float("inf")), "min", float("inf")),
        reduced(x.where(finite, float("-inf")), "max", float("-inf")),
        reduced((x == 0).to(x.dtype), "sum"), reduced((~finite).to(x.dtype), "sum"),
    ]  # fmt: skip
    return torch.stack(columns, dim=1)


def _histograms(values: Sequence[Tensor]) -> Tensor:
    """Counts by sign and power of two; zeros and non-finite values fall into an extra bin that is cut off."""
    x = torch.cat(list(values))
    lengths = torch.tensor([flat.numel() for flat in values], device=x.device)
    counted = x.isfinite() & (x != 0)
    exponent = torch.frexp(x.where(counted, 1.0)).exponent.long() - 1
    place = (exponent - LOWEST_EXPONENT).clamp(0, NUM_BINS - 1) + NUM_BINS * (x > 0)
    segment = torch.repeat_interleave(torch.arange(len(lengths), device=x.device), lengths, output_size=len(x))
    size = 2 * NUM_BINS + 1
    cell = segment * size + place.where(counted, 2 * NUM_BINS)
    counts = torch.zeros(len(lengths) * size, dtype=torch.int64, device=x.device)
    counts.scatter_add_(0, cell, torch.ones_like(cell))
    return counts.view(len(lengths), size)[:, : 2 * NUM_BINS].reshape(len(lengths), 2, NUM_BINS)


def _with_absent(rows: Tensor, absent: Sequence[int]) -> Tensor:
    """Rows that also count the zeros that sparse tensors do not store."""
    if not any(absent):
        return rows
    extra = torch.tensor(absent, dtype=rows.dtype, device=rows.device)
    count, total, squares, least, most, zeros, nonfinite = rows.unbind(1)
    least, most = (least.where(extra == 0, least.clamp(max=0.0)), most.where(extra == 0, most.clamp(min=0.0)))
    return torch.stack([count + extra, total, squares, least, most, zeros + extra, nonfinite], dim=1)


def num_elements(tensor: Tensor) -> int:
    """How many real numbers a tensor stands for, stored or not."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.numel() * (2 if local.is_complex() else 1)
