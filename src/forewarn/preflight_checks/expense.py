"""What a run will take: memory and time per step."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from forewarn.measure.module_tree import named_parameters
from forewarn.measure.nested import nested_tensors
from forewarn.preflight_checks.result import PreflightCheck, State
from forewarn.preflight_checks.twin import LossFunction, Twin
from forewarn.types import figure

DEFAULT_STEPS = 1000
"""Number of steps whose duration is shown if the number of the run is not given."""


def memory_check(twin: Twin, function: LossFunction, batch: Any, peak_bytes: int | None) -> PreflightCheck:
    """The memory of a training step, by its parts; after at least one step, so that the optimizer has its state.

    `peak_bytes` is what the allocator of the device has measured, if there is one.
    """
    parts = {
        "parameters": sum(_size(tensor) for tensor in (*twin.root.parameters(), *twin.root.buffers())),
        "gradients": sum(_size(parameter) for _, parameter in named_parameters(twin.root) if parameter.requires_grad),
        "optimizer": sum(
            _size(tensor)
            for optimizer in twin.optimizers
            for state in optimizer.state.values()
            for _, tensor in nested_tensors(state, local=False)
        ),
        "activations": _saved_bytes(twin, function, batch),
    }
    total = sum(parts.values())
    words = ", ".join(f"{name} {bytes_in_words(size)}" for name, size in parts.items())
    measured = "" if peak_bytes is None else f"peak {bytes_in_words(peak_bytes)} measured; "
    numbers = {name: float(size) for name, size in parts.items()} | {"total": float(peak_bytes or total)}
    return PreflightCheck("memory", State.INFO, f"{measured}about {bytes_in_words(total)}: {words}", "", numbers)


def _saved_bytes(twin: Twin, function: LossFunction, batch: Any) -> int:
    """What autograd keeps between the forward and the backward pass, parameters excepted."""
    held = {parameter.untyped_storage().data_ptr() for parameter in twin.root.parameters() if not parameter.is_meta}
    sizes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.layout is torch.strided:  # others have no storage of their own
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in held:
                sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        twin.loss(function, batch)
    return sum(sizes.values())


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def time_check(
    step_seconds: Sequence[float], data_seconds: Sequence[float], total_steps: int | None, accumulate: int = 1
) -> PreflightCheck:
    """How long a step of so many batches takes, and how long the run will; `step_seconds` are those of one batch."""
    step = accumulate * statistics.median(step_seconds[1:] or step_seconds)
    data = statistics.median(data_seconds[1:] or data_seconds) if data_seconds else 0.0
    num_steps = total_steps or DEFAULT_STEPS
    loading = f" and {seconds_in_words(data)} to load a batch" if data_seconds else ""
    whole = f"{num_steps:,} steps in about {seconds_in_words(num_steps * (step + accumulate * data))}"
    numbers = {"step_seconds": step, "data_seconds": data, "total_steps": float(num_steps)}
    return PreflightCheck("time", State.INFO, f"{seconds_in_words(step)} a step{loading}; {whole}", "", numbers)


def bytes_in_words(size: int) -> str:
    """`12.3 MB`."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= factor:
            return f"{size / factor:.3g} {unit}"
    return f"{size} bytes"


def seconds_in_words(seconds: float) -> str:
    """`31 ms`, `12.5 s`, `4.2 minutes`, `7.5 hours`, `3.1 days`."""
    for unit, factor in (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= 2 * factor:
            return f"{seconds / factor:.2g} {unit}"
    return f"{figure(seconds)} s" if seconds >= 1 else f"{figure(1000 * seconds)} ms"
