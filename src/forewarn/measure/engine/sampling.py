"""The measured update: how far a fixed sample of each tensor's weights moved, without a copy of the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forewarn.measure.engine import native
from forewarn.measure.engine.memory import is_dense
from forewarn.measure.engine.portable import dense_values, num_elements, wide
from forewarn.measure.engine.statistics import Measurement, Numbers

EPSILON = 1e-12
"""Added to the weight norm of an update ratio, so that a tensor of zeros that does not move has one: 0."""

_FNV_OFFSET, _FNV_PRIME = 0xCBF29CE484222325, 0x100000001B3  # the published constants of 64-bit FNV-1a
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # the increment and multipliers of SplitMix64
_MIX1, _MIX2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_LARGEST_INDEX = 2**31 - 1
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_LARGEST_EXACT = 2**48
"""Checksums are below this number: a float64 holds them exactly."""


def fnv1a(name: str) -> int:
    """The 64-bit FNV-1a hash of a name: the same in every process and on every machine."""
    hashed = _FNV_OFFSET
    for byte in name.encode(errors="surrogatepass"):
        hashed = ((hashed ^ byte) * _FNV_PRIME) & 0xFFFFFFFFFFFFFFFF
    return hashed


def sample_indices(name: str, num_elements: int, size: int) -> NDArray[np.int32]:
    """Up to `size` sorted indices into a tensor of `num_elements`, fixed by the tensor's name alone.

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


class _NativeGroup:
    """Tensors that the native backend reads: all in two calls, no torch operation."""

    def __init__(self, members: list[int], drawn: Sequence[NDArray[np.int32]]) -> None:
        self.members = members
        self._places = np.concatenate(drawn)
        self._offsets = np.cumsum([0, *map(len, drawn)], dtype=np.int64)
        self._before: NDArray[np.uint8] | None = None

    def remember(self, tensors: Sequence[Tensor]) -> None:
        self._before = native.gather(tensors, self._places, self._offsets, out=self._before)

    def forget(self) -> None:
        self._before = None

    def moved(self, tensors: Sequence[Tensor]) -> Numbers:
        assert self._before is not None
        return native.gather_diff(tensors, self._places, self._offsets, self._before)

    def marks(self, tensors: Sequence[Tensor]) -> Numbers:
        lengths = np.diff(self._offsets)
        sizes = [tensor.element_size() for tensor in tensors]
        sample = np.split(native.gather(tensors, self._places, self._offsets), np.cumsum(lengths * sizes)[:-1])
        bits = (part.view(f"i{size}").astype(np.int64) for part, size in zip(sample, sizes, strict=True))
        sums = [int((values * np.arange(1, len(values) + 1)).sum()) for values in bits]
        return np.array([total % _LARGEST_EXACT for total in sums], np.float64)

    @property
    def num_bytes(self) -> int:
        return self._places.nbytes + (0 if self._before is None else self._before.nbytes)


class _TorchGroup:
    """Tensors of one device and dtype, by torch operations: their samples lie side by side in one buffer."""

    def __init__(self, members: list[int], drawn: Sequence[NDArray[np.int32]], like: Tensor) -> None:
        self.members = members
        self._places = [torch.from_numpy(indices).to(like.device) for indices in drawn]
        self._lengths = torch.tensor([len(indices) for indices in drawn], device=like.device)
        self._before: Tensor | None = None

    def remember(self, tensors: Sequence[Tensor]) -> None:
        self._before = torch.cat(self._sample(tensors))

    def forget(self) -> None:
        self._before = None

    def moved(self, tensors: Sequence[Tensor]) -> Numbers:
        assert self._before is not None
        precise = wide(self._before.device)
        old = self._before.to(precise)
        step = torch.cat(self._sample(tensors)).to(precise) - old
        squares = torch.stack([step * step, old * old], dim=1)
        sums: Tensor = torch.segment_reduce(squares, "sum", lengths=self._lengths, axis=0, unsafe=True)
        return sums

    def marks(self, tensors: Sequence[Tensor]) -> Numbers:
        sample = torch.cat(self._sample(tensors))
        bits = sample.view(_BITS[sample.element_size()]).long()
        ends = self._lengths.cumsum(0)
        places = torch.arange(1, len(bits) + 1, device=bits.device)
        places -= torch.repeat_interleave(ends - self._lengths, self._lengths, output_size=len(bits))
        sums = torch.cat([bits.new_zeros(1), (bits * places).cumsum(0)])
        return (sums[ends] - sums[ends - self._lengths]).remainder(_LARGEST_EXACT).to(wide(bits.device))

    def _sample(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [_flat(tensor).index_select(0, places) for tensor, places in zip(tensors, self._places, strict=True)]

    @property
    def num_bytes(self) -> int:
        tensors = self._places if self._before is None else [*self._places, self._before]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class UpdateSampler:
    """Remembers a sample of many tensors and measures how far it has moved since.

    It holds an int32 index per sampled value and, from `remember` to `forget`, the value itself: 4, then 8 bytes ×
    `size` per float32 tensor. Places are drawn once per tensor, and again only if a tensor changes size, dtype or
    device.
    """

    def __init__(
        self,
        names: Sequence[str],
        size: int,
        sampled: Callable[[int, str], tuple[NDArray[np.int32], float] | None] = lambda index, name: None,
    ) -> None:
        """`sampled` gives the places in a shard, and the sampled share of the whole tensor; None for no shard."""
        self._names = tuple(names)
        self._size = size
        self._sampled = sampled
        self._kinds: tuple[object, ...] = ()
        self._groups: list[_NativeGroup | _TorchGroup] = []
        self.shares: NDArray[np.float64] = np.ones(len(self._names))
        """The sampled share of each tensor."""
        self.remembers = False

    def remember(self, tensors: Sequence[Tensor]) -> None:
        """Keep the current values; `tensors` are in the order of the names."""
        readable, kinds = _looked_at(tensors)
        if kinds != self._kinds:
            self._kinds = kinds
            self._prepare(tensors)
        for group in self._groups:
            group.remember(_members(readable, group.members))
        self.remembers = True

    def moved(self, tensors: Sequence[Tensor]) -> tuple[Sequence[int], list[Numbers]]:
        """How far tensors moved since `remember`: the order of the rows, and [n × (‖Δw‖², ‖w‖²)] per group.

        Empty if a tensor has changed size, dtype or device in the meantime.
        """
        readable, kinds = _looked_at(tensors)
        if not self.remembers or kinds != self._kinds:
            return [], []
        if len(self._groups) == 1:
            return range(len(tensors)), [self._groups[0].moved(readable)]
        order = [index for group in self._groups for index in group.members]
        return order, [group.moved(_members(readable, group.members)) for group in self._groups]

    def marks(self, tensors: Sequence[Tensor]) -> Numbers:
        """A checksum of the sample of each tensor, below 2**48: equal for equal values, on every machine."""
        readable, kinds = _looked_at(tensors)
        if kinds != self._kinds:
            self._kinds = kinds
            self._prepare(tensors)
        parts = [group.marks(_members(readable, group.members)) for group in self._groups]
        if len(parts) == 1:
            return parts[0]
        order = [index for group in self._groups for index in group.members]
        marks = Measurement(order, tuple(parts)).in_one_piece().rows
        return marks[0] if marks else np.zeros(0)

    def forget(self) -> None:
        """Drop the values; nothing is compared until `remember` is called again."""
        self.remembers = False
        for group in self._groups:
            group.forget()

    @property
    def num_bytes(self) -> int:
        """Memory held for places and remembered values."""
        return sum(group.num_bytes for group in self._groups)

    def _prepare(self, tensors: Sequence[Tensor]) -> None:
        """Draw the places."""
        kinds = [_kind(tensor) for tensor in tensors]
        drawn, shares = [], []
        for index, (name, kind) in enumerate(zip(self._names, kinds, strict=True)):
            places, share = self._sampled(index, name) or (sample_indices(name, kind.num_values, self._size), None)
            drawn.append(places)
            shares.append(len(places) / max(1, kind.num_values) if share is None else share)
        self.shares = np.array(shares)
        groups: dict[tuple[bool, torch.device | None, torch.dtype | None], list[int]] = {}
        for index, kind in enumerate(kinds):
            key = (True, None, None) if kind.native else (False, kind.device, kind.dtype)
            groups.setdefault(key, []).append(index)
        self._groups = [
            _NativeGroup(members, [drawn[index] for index in members])
            if is_native
            else _TorchGroup(members, [drawn[index] for index in members], tensors[members[0]])
            for (is_native, _, _), members in groups.items()
        ]


class _Kind(NamedTuple):
    """The properties of a tensor on which its sampled indices depend."""

    native: bool
    device: torch.device
    dtype: torch.dtype
    num_values: int


def _kind(tensor: Tensor) -> _Kind:
    return _Kind(native.available() and native.supports(tensor), tensor.device, tensor.dtype, num_elements(tensor))


def _looked_at(tensors: Sequence[Tensor]) -> tuple[Sequence[Tensor], tuple[object, ...]]:
    """The tensors, described for the library if it can read them all, and the properties that must not change."""
    if native.available() and (described := native.described(tensors)) is not None:
        return described, (described.lengths.tobytes(), described.kinds.tobytes())
    return tensors, tuple(map(_kind, tensors))


def _members(tensors: Sequence[Tensor], indices: list[int]) -> Sequence[Tensor]:
    return tensors if len(indices) == len(tensors) else [tensors[index] for index in indices]


def _flat(tensor: Tensor) -> Tensor:
    """The values of a tensor in one dimension, without a copy where its memory is dense in any order."""
    values = dense_values(tensor)
    if values.is_contiguous():
        return values.view(-1)
    if is_dense(values):
        return values.as_strided((values.numel(),), (1,))
    return values.reshape(-1)
