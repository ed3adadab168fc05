"""Statistics of many tensors by plain torch operations: correct on every device and kind of tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

COLUMNS = ("count", "sum", "sum_squares", "min", "max", "zeros", "nonfinite")
"""What a row holds: over the finite values, except `count` (all), `zeros` and `nonfinite` (the others)."""


def measure(tensors: Sequence[Tensor | None]) -> list[Tensor]:
    """One tensor per device used, each [n × columns] in double precision; together one row per input, by device order.

    Rows keep the order of the inputs within a device. A None is a row of NaN on the CPU.
    """
    rows: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        device = torch.device("cpu") if tensor is None else tensor.device
        rows.setdefault(device, []).append(_row(tensor))
    return [torch.stack(each) for each in rows.values()]


def device_order(tensors: Sequence[Tensor | None]) -> list[int]:
    """Which input each row of the concatenated result of `measure` belongs to."""
    places: dict[torch.device, list[int]] = {}
    for at, tensor in enumerate(tensors):
        device = torch.device("cpu") if tensor is None else tensor.device
        places.setdefault(device, []).append(at)
    return [at for each in places.values() for at in each]


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


def _row(tensor: Tensor | None) -> Tensor:
    if tensor is None:
        return torch.full((len(COLUMNS),), float("nan"), dtype=torch.float64)
    values = dense_values(tensor)
    whole = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    count = whole.numel() * (2 if whole.is_complex() else 1)
    absent = count - values.numel()
    x = values.to(wide(values.device))
    finite = x.isfinite()
    clean = x.where(finite, 0.0)
    if not x.numel():
        least = most = x.new_tensor(0.0 if absent else float("nan"))
    else:
        least, most = x.where(finite, float("inf")).amin(), x.where(finite, float("-inf")).amax()
        if absent:
            least, most = least.clamp(max=0.0), most.clamp(min=0.0)
    zeros = count - torch.count_nonzero(x)
    return torch.stack(
        [
            x.new_tensor(count),
            clean.sum(),
            (clean * clean).sum(),
            least,
            most,
            zeros.to(x.dtype),
            (values.numel() - finite.sum()).to(x.dtype),
        ]
    )
