"""Sampled updates: values at fixed indices, and how far they have moved since."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from forewarn.measure.engine.native.library import check, library, path_number
from forewarn.measure.engine.native.tensors import Described

Places = NDArray[np.int32]
Offsets = NDArray[np.int64]
Sample = NDArray[np.uint8]


def gather(tensors: Sequence[Tensor], places: Places, offsets: Offsets, out: Sample | None = None) -> Sample:
    """The values at some places of each tensor, as bytes in the tensor's own dtype: 4 for each float32.

    The places of tensor i are `places[offsets[i]:offsets[i + 1]]`, counted in the order of memory; a tensor with as
    many places as values is taken whole. `out` is reused if it has the right size.
    """
    described = Described.of(tensors)
    size = _sample_size(described, places, offsets)
    if out is None or out.size != size:
        out = np.empty(size, np.uint8)
    check(library().forewarn_gather(*described.arguments, places.ctypes.data, offsets.ctypes.data, out.ctypes.data))
    return out


def gather_diff(
    tensors: Sequence[Tensor], places: Places, offsets: Offsets, before: Sample, path: str | None = None
) -> NDArray[np.float64]:
    """How far tensors have moved since `gather` at the same places: [n × (‖Δw‖², ‖w‖²)], where w is the old value.

    `path` is the best of `paths()` unless given.
    """
    described = Described.of(tensors)
    size = _sample_size(described, places, offsets)
    if before.size != size:
        raise ValueError(f"the earlier sample has {before.size} bytes, this one {size}: has a dtype changed?")
    moved = np.empty((len(tensors), 2))
    check(
        library().forewarn_gather_diff(
            *described.arguments,
            places.ctypes.data,
            offsets.ctypes.data,
            before.ctypes.data,
            path_number(path),
            moved.ctypes.data,
        )
    )
    return moved


def _sample_size(described: Described, places: Places, offsets: Offsets) -> int:
    """Bytes of a sample; raises on arguments that would crash the C code."""
    for name, array, dtype in (("places", places, np.int32), ("offsets", offsets, np.int64)):
        if array.dtype != dtype or not array.flags.c_contiguous:
            raise TypeError(f"{name} must be contiguous {np.dtype(dtype)}, not {array.dtype}")
    lengths = np.diff(offsets)
    if len(lengths) != len(described) or offsets[0] != 0 or offsets[-1] != len(places) or (lengths < 0).any():
        raise ValueError(f"{len(described)} tensors need offsets that rise from 0 to {len(places)}, not {offsets}")
    return int((lengths * described.sizes).sum())
