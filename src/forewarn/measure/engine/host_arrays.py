"""Tensors in host memory as arrays, so that small ones are read without torch operations."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forewarn.measure.engine.native.tensors import owned

_DTYPES = {
    torch.float32: "<f4", torch.float64: "<f8", torch.float16: "<f2", torch.int64: "<i8", torch.int32: "<i4",
    torch.int16: "<i2", torch.int8: "|i1", torch.uint8: "|u1", torch.bool: "|b1",
}  # fmt: skip
"""The types that numpy has too, in its own words."""


class _Memory:
    """What numpy asks for to share memory."""

    __slots__ = ("__array_interface__",)

    def __init__(self, interface: dict[str, Any]) -> None:
        self.__array_interface__ = interface


def host_array(tensor: Tensor) -> NDArray[Any] | None:
    """The values of a tensor as an array that cannot be written to; None if they are elsewhere or of another type.

    It shares the memory of the tensor without keeping it alive: use it at once, or copy from it.
    """
    kind = _DTYPES.get(tensor.dtype)
    if kind is None or not owned((tensor,)) or not tensor.is_cpu or tensor.is_nested or tensor.is_neg():
        return None
    try:
        address = tensor.data_ptr()
    except RuntimeError:  # sparse, or within a functorch transform
        return None
    shape = tuple(tensor.shape)
    if not address:
        return np.empty(shape, kind) if not tensor.numel() else None
    strides = tuple(tensor.element_size() * stride for stride in tensor.stride())
    interface = {"shape": shape, "strides": strides, "typestr": kind, "data": (address, True), "version": 3}
    return np.asarray(_Memory(interface))
