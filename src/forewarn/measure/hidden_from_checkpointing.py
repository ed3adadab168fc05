"""Keeping what a probe computes out of the books of selective activation checkpointing."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.utils._python_dispatch import _disable_current_modes

_NOTHING = nullcontext()


def hidden_from_checkpointing() -> AbstractContextManager[object]:
    """Let torch operations in this block pass by selective checkpointing, which tells operations apart by counting.

    It keeps the results of the forward pass as "the third `mm`", and hands them out as the third `mm` of the
    recomputation, where no probe looks: one more operation in between, and every gradient is silently wrong.
    """
    depth = torch._C._len_torch_dispatch_stack()
    if depth and any(_counts(torch._C._get_dispatch_stack_at(at)) for at in range(depth)):
        return _disable_current_modes()
    return _NOTHING


def _counts(mode: object) -> bool:
    return type(mode).__module__ == "torch.utils.checkpoint"
