"""How a tensor is laid out in memory."""

from __future__ import annotations

from torch import Tensor


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill one stretch of memory, in whatever order: transposed and channels-last tensors do."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length != 1 and stride != expected:
            return False
        expected *= length
    return True
