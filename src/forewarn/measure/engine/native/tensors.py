"""Tensors as the library sees them: an address, a length and a kind of number."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import Parameter

from forewarn.measure.engine.memory import is_dense

T = TypeVar("T", bound=Tensor)

KINDS = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 3}
"""The numbers of `Dtype` in kernels.h."""
_SIZES = np.array([4, 8, 2, 2], np.int64)

dtype_of, is_on_the_host, _num_bytes = attrgetter("dtype"), attrgetter("is_cpu"), attrgetter("nbytes")


def supports(tensor: Tensor) -> bool:
    """Whether the library can read a tensor: real numbers in host memory, dense in any order, owned by the tensor.

    It only reads the tensor's attributes, in about half a microsecond; no torch operation runs.
    """
    if not _owns_its_memory[type(tensor)] or tensor.dtype not in KINDS or not tensor.is_cpu:
        return False
    try:
        # Sparse tensors and those within a functorch transform have no address; zeros without storage have address 0.
        return (tensor.data_ptr() != 0 or tensor.numel() == 0) and not tensor.is_neg() and is_dense(tensor)
    except RuntimeError:
        return False


def described(tensors: Sequence[Tensor]) -> Described | None:
    """The tensors as arrays for the library; None if it does not support all of them.

    Each property is read from all tensors before the next one, which is several times as fast as tensor by tensor.
    """
    if isinstance(tensors, Described):
        return tensors
    if isinstance(tensors, Standing):
        return tensors.described()
    if not owned(tensors) or not all(map(is_on_the_host, tensors)):
        return None
    try:
        table = Described.of(tensors)
        if not table.pointers.all() and ((table.pointers == 0) & (table.lengths > 0)).any():
            return None
        if any(map(Tensor.is_neg, tensors)):
            return None
        return table if all(map(Tensor.is_contiguous, tensors)) or all(map(is_dense, tensors)) else None
    except (KeyError, RuntimeError):  # an unsupported dtype, or no address
        return None


class _Owners(dict[type[Tensor], bool]):
    """Whether tensors of a class hold their own memory, looked up once; a DTensor, for example, does not."""

    def __missing__(self, kind: type[Tensor]) -> bool:
        functions = (Tensor.__torch_function__, Parameter.__torch_function__)
        self[kind] = kind.__torch_dispatch__ is Tensor.__torch_dispatch__ and kind.__torch_function__ in functions
        return self[kind]


_owns_its_memory = _Owners()


def owned(tensors: Sequence[Tensor]) -> bool:
    """Whether all of them are of classes that hold their own memory."""
    return all(map(_owns_its_memory.__getitem__, set(map(type, tensors))))


@dataclass(frozen=True, slots=True)
class Described(Sequence[Tensor]):
    """Tensors with the address, length and kind of each, as the library takes them."""

    pointers: NDArray[np.uint64]
    lengths: NDArray[np.int64]
    kinds: NDArray[np.uint8]
    tensors: Sequence[Tensor]
    """Kept alive for the pointers."""

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> Described:
        """The description of the tensors at this moment; gradients have new addresses on every step."""
        if isinstance(tensors, Described):
            return tensors
        num = len(tensors)
        table = np.empty((3, num), np.uint64)  # one array has one address to look up
        table[0] = list(map(Tensor.data_ptr, tensors))
        table[1] = list(map(Tensor.numel, tensors))
        kinds = table[2].view(np.uint8)[:num]
        kinds[:] = list(map(KINDS.__getitem__, map(dtype_of, tensors)))
        return cls(table[0], table[1].view(np.int64), kinds, tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def __getitem__(self, index: Any) -> Any:
        return self.tensors[index]

    def __iter__(self) -> Iterator[Tensor]:  # through `__getitem__` it would take as long as the measurement
        return iter(self.tensors)

    @property
    def arguments(self) -> tuple[int, int, int, int]:
        """The first arguments of every function of the library."""
        num, address = len(self.tensors), self.pointers.ctypes.data
        return num, address, address + 8 * num, address + 16 * num

    @property
    def sizes(self) -> NDArray[np.int64]:
        """Bytes per element."""
        sizes: NDArray[np.int64] = _SIZES[self.kinds]
        return sizes


class Standing(tuple[T, ...]):
    """Tensors that are read repeatedly, such as weights; described again only when one of them has moved."""

    _latest: Described | None = None
    _at: tuple[list[int], list[int]] | None = None
    """Where they were when they were described; then the rest of the description still holds.

    A new dtype or layout comes with a new address, because the old memory is freed after the new is allocated."""

    def described(self) -> Described | None:
        if self._latest is None or self._at != _places_of(self):
            self._latest = described(list(self))
            self._at = None if self._latest is None else _places_of(self)
        return self._latest


def _places_of(tensors: Sequence[Tensor]) -> tuple[list[int], list[int]]:
    """The address and size in bytes of each, as lists, which compare quickly."""
    return list(map(Tensor.data_ptr, tensors)), list(map(_num_bytes, tensors))
