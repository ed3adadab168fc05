"""What can be read when a run ends: the memory was full, a step hung, variables of the loop held NaN."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from forewarn.measure.probe import ONE, Reading

_OUT_OF_MEMORY = ("OutOfMemoryError", "MemoryError", "out of memory", "can't allocate memory", "not enough memory")
"""What the end reason of a run without memory contains: names of errors, and messages of torch's allocators."""
_OF_TORCH = str(Path(torch.__file__).parent)
_MAX_VALUES = 2**26
"""Largest tensor that is looked at: a run that has failed should still end soon."""
_MAX_NAMES = 8
"""Maximum number of variables that are named."""


def last_readings(
    step: int, reason: str, stalls: Mapping[str, float], error: BaseException | None
) -> tuple[int, list[Reading]]:
    """The readings that a run adds as it ends, and to which step: `step`, the last one, or the one that failed.

    `stalls`: the seconds of the step that hung and never ended, by phase.
    """
    readings: list[Reading] = []
    if stalls:
        readings.append(Reading("speed/stall_seconds", tuple(stalls), list(stalls.values())))
    if any(words in reason for words in _OUT_OF_MEMORY):
        readings.append(Reading("system/out_of_memory", ONE, 1.0))
    elif isinstance(error, Exception) and (held := variables_with_nan(error.__traceback__)):
        readings.append(Reading("batch/nan_at_failure", tuple(held), list(held.values())))
        step += 1  # of the step that failed, which never ended
    return step, readings


def variables_with_nan(trace: TracebackType | None) -> dict[str, int]:
    """The number of NaN in each local variable of the functions on the stack of an error, first assigned first.

    The functions of torch are left out. Infinities do not count: masks hold them on purpose.
    """
    counts: dict[str, int] = {}
    while trace is not None and len(counts) < _MAX_NAMES:
        if not trace.tb_frame.f_code.co_filename.startswith(_OF_TORCH):
            for name, value in trace.tb_frame.f_locals.items():
                if name not in counts and (num_nan := _num_nan(value)):
                    counts[name] = num_nan
        trace = trace.tb_next
    return dict(list(counts.items())[:_MAX_NAMES])


def _num_nan(value: Any) -> int:
    if type(value) is not Tensor or not value.is_floating_point() or value.is_meta or value.numel() > _MAX_VALUES:
        return 0
    try:
        return int(value.detach().isnan().sum())
    except (RuntimeError, NotImplementedError):  # a tensor without storage, or a device that has failed itself
        return 0
