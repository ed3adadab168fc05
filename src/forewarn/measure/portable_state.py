"""State that `torch.save` and `torch.load(weights_only=True)` can round-trip: tensors and plain values."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor


def to_tensors(tree: Any) -> Any:
    """The same tree with numpy arrays as tensors."""
    if isinstance(tree, dict):
        return {name: to_tensors(value) for name, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [to_tensors(value) for value in tree]
    if isinstance(tree, np.ndarray):
        return torch.from_numpy(tree.copy())
    return tree.item() if isinstance(tree, np.generic) else tree


def to_arrays(tree: Any) -> Any:
    """The same tree with tensors as numpy arrays."""
    if isinstance(tree, dict):
        return {name: to_arrays(value) for name, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [to_arrays(value) for value in tree]
    return tree.cpu().numpy() if isinstance(tree, Tensor) else tree
