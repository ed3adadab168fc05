"""Gradient clipping, on request: by the norm of the whole model, however it is divided over processes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def clip_grad_norm_(model: nn.Module, max_norm: float, *, error_if_nonfinite: bool = False) -> Tensor:
    """Clip the gradients of a model and return their norm.

    FSDP1 has to do it itself: its gradients are plain tensors, of which no process has all.
    """
    parameters = list(model.parameters())
    if not any(hasattr(parameter, "_fsdp_flattened") for parameter in parameters):
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, error_if_nonfinite=error_if_nonfinite)
    modules = (module for module in model.modules() if type(module).__name__ == "FullyShardedDataParallel")
    root: Any = next(modules, None)
    if root is None or not root.check_is_root() or set(parameters) != set(root.parameters()):
        raise ValueError(
            "clip_grad_norm_ needs the whole model in one FullyShardedDataParallel, and that one must be watched; "
            "otherwise clip with its own clip_grad_norm_, and report the norm with monitor.clipped(norm, max_norm)"
        )
    norm: Tensor = root.clip_grad_norm_(max_norm)
    if error_if_nonfinite and not torch.isfinite(norm):
        raise RuntimeError(f"the norm of the gradients is {norm.item()}, so they cannot be clipped")
    return norm
