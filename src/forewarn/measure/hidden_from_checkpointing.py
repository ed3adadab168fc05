"""Hides the operations of probes from selective activation checkpointing."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.utils._python_dispatch import _disable_current_modes

_NOTHING = nullcontext()


def hidden_from_checkpointing() -> AbstractContextManager[object]:
    """Hide the torch operations in this block from selective checkpointing, which identifies operations by counting.

    It stores a forward result as "the third `mm`" and returns it for the third `mm` of the recomputation, where no
    probe runs. One extra operation in between would make every gradient silently wrong.
    """
    depth = torch._C._len_torch_dispatch_stack()
    if depth and any(_counts(torch._C._get_dispatch_stack_at(level)) for level in range(depth)):
        return _disable_current_modes()
    return _NOTHING


def _counts(mode: object) -> bool:
    return type(mode).__module__ == "torch.utils.checkpoint"
