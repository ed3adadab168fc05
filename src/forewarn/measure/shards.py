"""The part of each parameter that this rank holds, and whether it is this rank that reads it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from forewarn.measure.engine import sample_indices

_WHOLE = 0, 1
"""The place of a rank among those that compute one layer, and their number, if it computes all of it."""


@dataclass(frozen=True, slots=True)
class Shard:
    """A block of a parameter: all of it, a part, or nothing."""

    shape: tuple[int, ...]
    """The shape of the whole parameter."""
    local_shape: tuple[int, ...]
    offset: tuple[int, ...]
    """Where the block begins in each dimension; with only one of them, in the flattened parameter."""
    is_read: bool
    """Whether this rank reads it; of the ranks that hold a copy of the same block, one does."""
    is_divided: bool
    """Whether other ranks hold other blocks."""

    def counted(self, tensor: Tensor) -> Tensor:
        """What this rank reads of a tensor that is its block, or a whole copy: nothing if another rank reads it."""
        if not self.is_read:
            return tensor.detach().flatten()[:0]
        if tuple(tensor.shape) == self.local_shape:
            return tensor
        if len(self.offset) != len(self.shape):  # a flat piece
            tensor = tensor.flatten()
        ends = zip(self.offset, self.local_shape, strict=True)
        return tensor[tuple(slice(start, start + size) for start, size in ends)]

    def sampled(self, name: str, size: int) -> tuple[NDArray[np.int32], float]:
        """The places in this block of the values sampled from the whole parameter, and the sampled fraction of it."""
        num_values = int(np.prod(self.shape, dtype=np.int64))
        drawn = sample_indices(name, num_values, size)
        share = len(drawn) / max(1, num_values)
        if not self.is_read or 0 in self.local_shape:
            return np.zeros(0, np.int32), share
        if self.local_shape == self.shape:
            return drawn, share
        shape = self.shape if len(self.offset) == len(self.shape) else (num_values,)
        places = np.stack(np.unravel_index(drawn, shape)) - np.array(self.offset)[:, None]
        inside = ((places >= 0) & (places < np.array(self.local_shape)[:, None])).all(axis=0)
        local = np.ravel_multi_index(tuple(places[:, inside]), self.local_shape)
        return np.sort(local).astype(np.int32), share


class Shards:
    """The shards of a model's parameters, in their order.

    Each value of a parameter is read by exactly one rank, so sums over ranks count it once. The first rank, which is 0
    except in later stages of a pipeline, reads everything that it holds; of parameters that all ranks hold, as under
    DDP, the others read nothing.
    """

    def __init__(self, model: nn.Module, parameters: Sequence[nn.Parameter], rank: int, first: int = 0) -> None:
        self.rank, self._first = rank, first
        flat = dict(_flat_shards(model, first))
        self.of: list[Shard] = [
            flat[id(parameter)] if id(parameter) in flat else _shard(parameter, rank, first) for parameter in parameters
        ]
        self._read = {id(parameter) for parameter, shard in zip(parameters, self.of, strict=True) if shard.is_read}
        self.is_sharded = any(shard.is_divided for shard in self.of)
        """Whether ranks hold different parts of a parameter; if not, the first rank reads all of them, as under DDP."""

        self._of_data = {name for module in model.modules() for name in _names_of_data_mesh(module)}
        """The dimensions of meshes over which every rank has its own batch; the others are those of tensor parallelism.
        """
        self.tensor_part = max((self._tensor_part(parameter) for parameter in parameters), key=_size, default=_WHOLE)
        """The place of this rank among those that compute different parts of a layer for the same batch, their number.
        """

    @property
    def is_twin(self) -> bool:
        """Whether this rank trains on the batch of another one, as with tensor parallelism."""
        return self.tensor_part[0] > 0

    def part_of(self, module: nn.Module) -> tuple[int, int]:
        """The place and number of parts as in `tensor_part`, of one layer: ranks may also hold copies of it."""
        parts = (self._tensor_part(parameter, only_divided=True) for parameter in module.parameters())
        return max(parts, key=_size, default=_WHOLE)

    def _tensor_part(self, parameter: nn.Parameter, only_divided: bool = False) -> tuple[int, int]:
        """By the dimensions of the mesh of a parameter that are not for data; or those that divide it."""
        mesh: Any = getattr(parameter, "device_mesh", None)
        if mesh is None or (self._of_data and mesh.mesh_dim_names is None):
            return _WHOLE
        names, coordinate = mesh.mesh_dim_names or range(mesh.ndim), mesh.get_coordinate() or [0] * mesh.ndim
        place, size = _WHOLE
        for dim, placement in enumerate(parameter.placements):  # type: ignore[attr-defined]
            if names[dim] not in self._of_data and (placement.is_shard() or not only_divided):
                place, size = place * mesh.size(dim) + coordinate[dim], size * mesh.size(dim)
        return place, size

    def reads(self, parameter: nn.Parameter) -> bool:
        return id(parameter) in self._read

    def reads_gradient(self, parameter: nn.Parameter) -> bool:
        """Whether this rank reads the gradient of a parameter, or its part of it.

        The gradient may be divided in another way: every rank has the whole one of an embedding whose rows are divided.
        """
        gradient: Any = parameter.grad
        placements = getattr(gradient, "placements", None)
        if placements is None or placements == getattr(parameter, "placements", None):
            return self.reads(parameter)
        return _shard(gradient, self.rank, self._first).is_read

    def gradients(self, parameters: Sequence[nn.Parameter]) -> list[Tensor | None]:
        """What this rank reads of each gradient: its own part, or None if there is none or another rank reads it."""
        return [
            local_part(parameter.grad) if parameter.grad is not None and self.reads_gradient(parameter) else None
            for parameter in parameters
        ]

    def weights(self, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        """What this rank reads of each parameter: its own part, or an empty tensor if another rank reads it."""
        parts = (
            local_part(parameter) if shard.is_read else None
            for parameter, shard in zip(parameters, self.of, strict=True)
        )
        return [
            torch.empty(0, dtype=parameter.dtype) if part is None else part
            for part, parameter in zip(parts, parameters, strict=True)
        ]


def local_part(tensor: Tensor) -> Tensor | None:
    """The part of a tensor that this rank holds; None if it holds a summand, which says nothing about the sum."""
    if not hasattr(tensor, "to_local"):
        return tensor
    if any(placement.is_partial() for placement in tensor.placements):  # type: ignore[attr-defined]
        return None
    with torch.no_grad():
        part: Tensor = tensor.to_local()
    return part


def own_summand(tensor: Tensor, is_twin: bool) -> Tensor:
    """What this rank adds to a gradient that is summed over all ranks: of its size, zero where other ranks count."""
    if not hasattr(tensor, "to_local"):
        return torch.zeros_like(tensor) if is_twin else tensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh, placements = tensor.device_mesh, tensor.placements  # type: ignore[attr-defined]
    coordinate = mesh.get_coordinate()
    with torch.no_grad():
        part: Tensor = tensor.to_local()
    whole = part.new_zeros(tensor.shape)
    if not any(place for place, how in zip(coordinate, placements, strict=True) if how.is_replicate()):
        shape, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
        whole[tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))] = part
    return whole


def own_share_of_norm(norm: Any, rank: int, first: int) -> Any:
    """What this rank adds to the norm over all ranks: the norm of its shards, or nothing if others count it."""
    if not hasattr(norm, "to_local"):
        return norm if rank == first else 0.0
    coordinate = norm.device_mesh.get_coordinate()
    counts = coordinate is not None and first in norm.device_mesh.mesh.flatten().tolist()
    copies = [place for place, how in zip(coordinate or (), norm.placements, strict=False) if not how.is_partial()]
    return norm.to_local() if counts and not any(copies) else 0.0


def ranks_together(model: nn.Module, parameters: Sequence[nn.Parameter]) -> set[int]:
    """The ranks that train this model together, by its wrappers and shards; empty if these do not tell."""
    together: set[int] = set()
    for module in model.modules():
        if type(module).__name__ in ("DistributedDataParallel", "FullyShardedDataParallel"):
            together.update(dist.get_process_group_ranks(module.process_group))  # type: ignore[arg-type]
    for parameter in parameters:
        if (mesh := getattr(parameter, "device_mesh", None)) is not None:
            together.update(mesh.mesh.flatten().tolist())
    return together


def _shard(parameter: Tensor, rank: int, first: int) -> Shard:
    """The shard of a DTensor; any other tensor is the same on all ranks."""
    shape = tuple(parameter.shape)
    mesh: Any = getattr(parameter, "device_mesh", None)
    if mesh is None:
        return Shard(shape, shape, (0,) * len(shape), is_read=rank == first, is_divided=False)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    placements: Any = parameter.placements  # type: ignore[attr-defined]
    coordinate = mesh.get_coordinate()
    is_member = coordinate is not None and first in mesh.mesh.flatten().tolist()  # other meshes hold copies
    is_first = is_member and not any(
        place for place, placement in zip(coordinate, placements, strict=True) if placement.is_replicate()
    )
    local_shape, offset = compute_local_shape_and_global_offset(parameter.shape, mesh, placements)
    is_divided = any(placement.is_shard() and mesh.size(dim) > 1 for dim, placement in enumerate(placements))
    return Shard(shape, tuple(local_shape), tuple(offset), is_first, is_divided)


def _flat_shards(model: nn.Module, first: int) -> Iterator[tuple[int, Shard]]:
    """The shards of FSDP1, whose parameters are flat pieces of one buffer, or without `use_orig_params` the buffer."""
    for module, handle in _flat_handles(model):
        flat = handle.flat_param
        if not handle.uses_sharded_strategy:
            continue
        is_first = dist.get_rank() == first or not _is_copy(module)
        if flat._params is None:
            size = flat._sharded_size.numel()
            yield id(flat), Shard((size * handle.world_size,), (size,), (size * handle.rank,), is_first, True)
            continue
        for parameter, shape, info in zip(flat._params, flat._shapes, flat._shard_param_infos, strict=True):
            local, start = (info.numel_in_shard, info.intra_param_start_idx) if info.in_shard else (0, 0)
            yield id(parameter), Shard(tuple(shape), (local,), (start,), is_first, is_divided=True)


def _flat_handles(model: nn.Module) -> Iterator[tuple[nn.Module, Any]]:
    for module in model.modules():
        handle: Any = getattr(module, "_handle", None) if type(module).__name__ == "FullyShardedDataParallel" else None
        if getattr(handle, "flat_param", None) is not None:
            yield module, handle


def are_of_another_fsdp(model: nn.Module, parameters: Sequence[nn.Parameter]) -> bool:
    """Whether some of these are flat pieces of an FSDP1 module around the model, which alone knows what they are."""
    pieces = {id(parameter) for parameter in parameters if hasattr(parameter, "_fsdp_flattened")}
    if not pieces:
        return False
    held = [handle.flat_param for _, handle in _flat_handles(model)]
    return not pieces <= {id(parameter) for flat in held for parameter in [flat, *(flat._params or ())]}


def _size(part: tuple[int, int]) -> int:
    return part[1]


def _names_of_data_mesh(module: nn.Module) -> tuple[Any, ...]:
    """The dimensions over which FSDP2 shards and replicates a module; without names, (None,)."""
    if "FSDPModule" not in {base.__name__ for base in type(module).__mro__}:
        return ()
    try:
        group = module._get_fsdp_state()._fsdp_param_group  # type: ignore[operator]
        return group.mesh_info.mesh.mesh_dim_names or (None,)
    except AttributeError:  # nothing to shard in this module, or another version of torch
        return (None,)


def _is_copy(module: Any) -> bool:
    """Whether another rank holds the same shard and reads it, as with a hybrid sharding strategy."""
    group = getattr(module, "_inter_node_pg", None)
    return group is not None and dist.get_rank(group) > 0
