"""How a tensor is laid out in memory."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

_READERS = {torch.float32: ctypes.c_float.from_address, torch.float64: ctypes.c_double.from_address}


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


def number_of(tensor: Tensor) -> float | None:
    """The one element of a tensor in host memory, read without a torch operation; None of any other tensor."""
    read = _READERS.get(tensor.dtype)
    if read is None or type(tensor) is not Tensor or not tensor.is_cpu or tensor.numel() != 1 or tensor.is_neg():
        return None
    try:
        address = tensor.data_ptr()
    except RuntimeError:  # within a functorch transform
        return None
    return float(read(address).value) if address else None
