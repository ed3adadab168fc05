"""Tensors as the library sees them: an address, a length and a kind of number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import Parameter

from forewarn.stats.memory import is_dense

KINDS = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 3}
"""The numbers of `Dtype` in kernels.h."""
_SIZES = np.array([4, 8, 2, 2], np.int64)


def supports(tensor: Tensor) -> bool:
    """Whether the library can read a tensor: real numbers in host memory, dense in any order, and nothing in between.

    Asks only for what a tensor knows of itself, at about half a microsecond; no torch operation runs.
    """
    if not _owns_its_memory[type(tensor)] or tensor.dtype not in KINDS or not tensor.is_cpu:
        return False
    try:
        # Sparse tensors and those within a functorch transform have no address, zeros that are nowhere stored have 0.
        return (tensor.data_ptr() != 0 or tensor.numel() == 0) and not tensor.is_neg() and is_dense(tensor)
    except RuntimeError:
        return False


class _Owners(dict[type[Tensor], bool]):
    """Whether tensors of a class are what they seem, looked up once: a DTensor, for one, has its numbers elsewhere."""

    def __missing__(self, kind: type[Tensor]) -> bool:
        functions = (Tensor.__torch_function__, Parameter.__torch_function__)
        self[kind] = kind.__torch_dispatch__ is Tensor.__torch_dispatch__ and kind.__torch_function__ in functions
        return self[kind]


_owns_its_memory = _Owners()


@dataclass(frozen=True, slots=True)
class Described:
    """Tensors as arrays for the library; the tensors themselves must stay alive."""

    pointers: NDArray[np.uint64]
    lengths: NDArray[np.int64]
    kinds: NDArray[np.uint8]

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> Described:
        """About half a microsecond per tensor: gradients have new addresses on every step."""
        num = len(tensors)
        return cls(
            np.fromiter(map(Tensor.data_ptr, tensors), np.uint64, num),
            np.fromiter(map(Tensor.numel, tensors), np.int64, num),
            np.fromiter([KINDS[tensor.dtype] for tensor in tensors], np.uint8, num),
        )

    @property
    def arguments(self) -> tuple[int, int, int, int]:
        """What every function of the library takes first."""
        return len(self.lengths), self.pointers.ctypes.data, self.lengths.ctypes.data, self.kinds.ctypes.data

    @property
    def sizes(self) -> NDArray[np.int64]:
        """Bytes per element."""
        sizes: NDArray[np.int64] = _SIZES[self.kinds]
        return sizes
