"""The measured update: how far a fixed sample of each tensor's weights moved, without a copy of the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forewarn.stats.portable import dense_values, wide

EPSILON = 1e-12
"""Added to the weight norm of an update ratio, so that a tensor of zeros has one."""

_FNV_OFFSET, _FNV_PRIME = 0xCBF29CE484222325, 0x100000001B3  # the published constants of 64-bit FNV-1a
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # the increment and multipliers of SplitMix64
_MIX1, _MIX2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_LARGEST_INDEX = 2**31 - 1


def fnv1a(name: str) -> int:
    """The 64-bit FNV-1a hash of a name: the same in every process and on every machine."""
    hashed = _FNV_OFFSET
    for byte in name.encode():
        hashed = ((hashed ^ byte) * _FNV_PRIME) & 0xFFFFFFFFFFFFFFFF
    return hashed


def sample_indices(name: str, num_elements: int, size: int) -> NDArray[np.int32]:
    """Up to `size` places in a tensor of so many elements, sorted, fixed by the tensor's name alone.

    A tensor that is no larger than the sample is taken whole. Draws are by counter, so no random state is touched.
    """
    if num_elements <= size:
        return np.arange(num_elements, dtype=np.int32)
    with np.errstate(over="ignore"):
        mixed = np.uint64(fnv1a(name)) + _GOLDEN * np.arange(1, size + 1, dtype=np.uint64)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * _MIX1
        mixed = (mixed ^ (mixed >> np.uint64(27))) * _MIX2
        mixed ^= mixed >> np.uint64(31)
    reach = np.uint64(min(num_elements, _LARGEST_INDEX))
    drawn = ((mixed >> np.uint64(32)) * reach) >> np.uint64(32)
    return np.sort(drawn.astype(np.int32))


@dataclass(slots=True)
class _Group:
    """The tensors of one device and dtype, their samples side by side in one buffer."""

    which: list[int]
    lengths: Tensor
    before: Tensor


class UpdateSampler:
    """Remembers a sample of many tensors and measures how far it has moved since.

    Holds an int32 index and one value per sample, reused: about 8 bytes × `size` per float32 tensor. The places are
    drawn once per tensor; samples of one device and dtype lie in one buffer, so that all are compared at once.
    """

    def __init__(self, names: Sequence[str], size: int) -> None:
        self._names = tuple(names)
        self._size = size
        self._kinds: tuple[tuple[torch.device, torch.dtype], ...] = ()
        self._places: list[Tensor] = []
        self._groups: list[_Group] = []
        self.shares: NDArray[np.float64] = np.ones(len(self._names))
        """Which share of each tensor is sampled."""
        self.remembers = False

    def remember(self, tensors: Sequence[Tensor]) -> None:
        """Keep the present values; `tensors` are in the order of the names."""
        kinds = tuple((tensor.device, tensor.dtype) for tensor in tensors)
        if kinds != self._kinds:
            self._prepare(tensors, kinds)
        for group in self._groups:
            torch.cat(self._sample(tensors, group.which), out=group.before)
        self.remembers = True

    def moved(self, tensors: Sequence[Tensor]) -> tuple[list[int], list[Tensor]]:
        """What has moved since `remember`: the order of the rows, and per group of tensors [n × (‖Δw‖², ‖w‖²)]."""
        order: list[int] = []
        results: list[Tensor] = []
        for group in self._groups if self.remembers else ():
            precise = wide(group.before.device)
            old = group.before.to(precise)
            step = torch.cat(self._sample(tensors, group.which)).to(precise) - old
            squares = torch.stack([step * step, old * old], dim=1)
            results.append(torch.segment_reduce(squares, "sum", lengths=group.lengths, axis=0, unsafe=True))
            order += group.which
        return order, results

    def forget(self) -> None:
        """Compare with nothing until `remember` is called again; the buffers are kept."""
        self.remembers = False

    @property
    def num_bytes(self) -> int:
        """Memory held for places and remembered values."""
        held = [*self._places, *(group.before for group in self._groups)]
        return sum(tensor.numel() * tensor.element_size() for tensor in held)

    def _prepare(self, tensors: Sequence[Tensor], kinds: tuple[tuple[torch.device, torch.dtype], ...]) -> None:
        """Draw the places and make the buffers."""
        self._kinds = kinds
        counts = [_num_values(tensor) for tensor in tensors]
        drawn = [sample_indices(name, count, self._size) for name, count in zip(self._names, counts, strict=True)]
        self.shares = np.array([len(each) / max(1, count) for each, count in zip(drawn, counts, strict=True)])
        self._places = [torch.from_numpy(each).to(device) for each, (device, _) in zip(drawn, kinds, strict=True)]
        self._groups = []
        for kind in dict.fromkeys(kinds):
            device, dtype = kind
            which = [at for at, other in enumerate(kinds) if other == kind]
            lengths = [len(drawn[at]) for at in which]
            real = torch.empty((), dtype=dtype).real.dtype
            self._groups.append(
                _Group(
                    which, torch.tensor(lengths, device=device), torch.empty(sum(lengths), dtype=real, device=device)
                )
            )

    def _sample(self, tensors: Sequence[Tensor], which: Sequence[int]) -> list[Tensor]:
        return [_flat(tensors[at]).index_select(0, self._places[at]) for at in which]


def _num_values(tensor: Tensor) -> int:
    return tensor.numel() * (2 if tensor.is_complex() else 1)


def _flat(tensor: Tensor) -> Tensor:
    """The values of a tensor in one dimension, without a copy where its memory is dense in any order."""
    values = dense_values(tensor)
    if values.is_contiguous():
        return values.view(-1)
    if _is_dense(values):
        return values.as_strided((values.numel(),), (1,))
    return values.reshape(-1)


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill one stretch of memory, in whatever order: transposed and channels-last tensors do."""
    expected = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length != 1 and stride != expected:
            return False
        expected *= length
    return True
