"""What the variables of a loop held when it failed."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

_OF_TORCH = str(Path(torch.__file__).parent)
_MAX_VALUES = 2**26
"""Largest tensor that is looked at: a run that has failed should still end soon."""
_MAX_NAMES = 8
"""Maximum number of variables that are named."""


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
