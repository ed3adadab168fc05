"""Statistics of many CUDA tensors by a Triton kernel: one launch per dtype for any number of tensors, no host sync.

A second, tiny launch adds up the partial results of all dtypes. Triton comes with the CUDA builds of torch. Where it is
missing, `supports` returns False and plain torch operations measure instead.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forewarn.measure.engine.memory import is_dense
from forewarn.measure.engine.statistics import COLUMNS, LOWEST_EXPONENT, MOMENTS, NUM_BINS

BLOCK = 4096
"""Number of consecutive values that a sampled histogram takes or skips; it always takes the first block."""

_CHUNK = 4 * BLOCK
"""Number of values that one program of the kernel reads before it writes its partial results."""

_TILE = 1024
"""Number of values read at once: eight for each of 128 threads, so sums, extrema and counts stay in registers."""

_COMBINED = 256
"""Number of chunks whose partial results are added at once."""

_LAUNCH = {"num_warps": 4, "enable_fp_fusion": False}
"""128 threads. Only what the kernel itself fuses is fused, so results do not depend on Triton's default."""

_OLDEST_CAPABILITY = (7, 0)
"""Compute capability below which Triton does not compile (Volta is 7.0)."""

_PLANS_KEPT = 8
"""Number of sets of shapes whose tables are kept: gradients and weights of a few optimizers."""

_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class _Plan:
    """How tensors of given sizes and dtypes are split into chunks, grouped by dtype."""

    table: NDArray[np.int64]
    """The table of the kernels without its addresses: lengths, first chunks, the owner of every chunk."""
    launches: tuple[tuple[torch.dtype, int, int], ...]
    """Each dtype with its first chunk and its number of chunks."""
    num_chunks: int


def why_not() -> str:
    """Why this backend cannot run here; empty if it can."""
    missing = _without_triton()
    if missing:
        return missing
    if not _interpreted() and not torch.cuda.is_available():
        return "torch sees no CUDA device"
    return ""


def available() -> bool:
    """Whether Triton and a CUDA device are available, or TRITON_INTERPRET=1 selects Triton's interpreter.

    This may start the CUDA driver, after which a process should not fork; `supports` only inspects its tensor.
    """
    return not why_not()


def supports(tensor: Tensor) -> bool:
    """Whether the kernel can read this tensor's memory directly: plain, dense in any order, on a CUDA device."""
    return (
        (tensor.is_cpu if _interpreted() else tensor.is_cuda)
        and tensor.dtype in _DTYPES
        and tensor.layout is torch.strided
        and not hasattr(tensor, "__tensor_flatten__")  # a wrapper, such as a DTensor, owns no memory
        and not tensor.is_neg()  # its memory holds the negated values
        and is_dense(tensor)
        and not _without_triton()
        and _is_recent(tensor.get_device())
    )


def measure(tensors: Sequence[Tensor], histogram_blocks: int = 0, powers: bool = False) -> tuple[Tensor, Tensor | None]:
    """Rows [n × columns] in double precision and histograms [n × 2 × bins] in int64, on the one device of the tensors.

    With `powers` the columns are `MOMENTS`, otherwise `COLUMNS`.

    A histogram counts up to `histogram_blocks` evenly spaced blocks of 4096 values, from the first on, or one block in
    16 if that is more. 0 means no histograms. Nothing waits for the device: addresses travel with the table from pinned
    memory.
    """
    refused = [index for index, tensor in enumerate(tensors) if not supports(tensor)]
    devices = {tensor.device for tensor in tensors}
    if refused or len(devices) != 1:
        raise ValueError(
            f"expected dense tensors of {', '.join(map(str, _DTYPES))} on one device, got {len(devices)} devices and "
            f"{len(refused)} tensors of another kind; ask supports() first and use the portable backend for the others"
        )
    device = devices.pop()
    plan = _plan(tuple(tensor.numel() for tensor in tensors), tuple(tensor.dtype for tensor in tensors))
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        return _launch(plan, _on_device(plan, tensors, device), len(tensors), histogram_blocks, powers)


def _launch(
    plan: _Plan, table: Tensor, num_tensors: int, most_blocks: int, powers: bool
) -> tuple[Tensor, Tensor | None]:
    import triton.language as tl

    from forewarn.measure.engine import cuda_kernels

    device = table.device
    num_columns = len(MOMENTS if powers else COLUMNS)
    # Every column but `count`, which is known beforehand.
    partials = torch.empty((num_columns - 1, plan.num_chunks), dtype=torch.float64, device=device)
    rows = torch.empty((num_tensors, num_columns), dtype=torch.float64, device=device)
    histograms = torch.zeros((num_tensors, 2, NUM_BINS), dtype=torch.int64, device=device) if most_blocks else None
    for dtype, first_chunk, num_chunks in plan.launches:
        cuda_kernels.read_chunks[(num_chunks,)](
            table,
            partials,
            histograms,
            num_tensors,
            plan.num_chunks,
            first_chunk,
            most_blocks,
            torch.empty(0, dtype=dtype, device=device),
            WIDE=tl.float64 if dtype is torch.float64 else tl.float32,
            HISTOGRAM=bool(most_blocks),
            POWERS=powers,
            CHUNK=_CHUNK,
            TILE=_TILE,
            BLOCK=BLOCK,
            NUM_BINS=NUM_BINS,
            LOWEST_EXPONENT=LOWEST_EXPONENT,
            **_LAUNCH,
        )
    cuda_kernels.add_chunks[(num_tensors,)](
        table, partials, rows, num_tensors, plan.num_chunks,
        POWERS=powers, CHUNK=_CHUNK, TILE=_COMBINED, **_LAUNCH,
    )  # fmt: skip
    return rows, histograms


@lru_cache(maxsize=_PLANS_KEPT)
def _plan(lengths: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> _Plan:
    """Chunks by dtype, then by tensor; an empty tensor has none."""
    sizes = np.array(lengths, np.int64)
    num_chunks = -(-sizes // _CHUNK)
    kinds = list(dict.fromkeys(dtypes))
    order = np.argsort([kinds.index(dtype) for dtype in dtypes], kind="stable")
    first = np.zeros_like(sizes)
    first[order] = np.cumsum(num_chunks[order]) - num_chunks[order]
    launches = []
    for dtype in kinds:
        indices = [index for index, candidate in enumerate(dtypes) if candidate is dtype and lengths[index]]
        if indices:
            launches.append((dtype, int(first[indices[0]]), int(num_chunks[indices].sum())))
    owners = np.repeat(order, num_chunks[order])
    return _Plan(np.concatenate([sizes, first, owners]), tuple(launches), len(owners))


def _on_device(plan: _Plan, tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """The whole table, copied without waiting.

    Each call allocates new pinned and device memory, which no earlier copy or kernel on any stream still needs. Both
    come from torch's caches, which reuse memory only when the device is done with it.
    """
    size = len(tensors) + len(plan.table)
    host = torch.empty(size, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
    filled = host.numpy()
    filled[: len(tensors)] = [tensor.data_ptr() for tensor in tensors]
    filled[len(tensors) :] = plan.table
    return host.to(device, non_blocking=True)


@cache
def _interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on the CPU: slow, for tests only. Triton, too, reads this once."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@cache
def _without_triton() -> str:
    """Why Triton is unavailable; empty if it is available."""
    try:
        import triton  # noqa: F401
    except ImportError as error:
        return f"Triton cannot be imported ({error}): pip install triton"
    return ""


@cache
def _is_recent(device: int) -> bool:
    """Whether Triton compiles for a CUDA device; the interpreter's device is -1."""
    return device < 0 or torch.version.hip is not None or torch.cuda.get_device_capability(device) >= _OLDEST_CAPABILITY
