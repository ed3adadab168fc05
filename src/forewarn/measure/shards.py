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
        self.rank = rank
        flat = dict(_flat_shards(model, first))
        self.of: list[Shard] = [
            flat[id(parameter)] if id(parameter) in flat else _shard(parameter, rank, first) for parameter in parameters
        ]
        self._read = {id(parameter) for parameter, shard in zip(parameters, self.of, strict=True) if shard.is_read}
        self.is_sharded = any(shard.is_divided for shard in self.of)
        """Whether ranks hold different parts of a parameter; if not, the first rank reads all of them, as under DDP."""

        is_parallel, self.is_twin = _tensor_parallel(model, parameters)
        self.is_tensor_parallel = is_parallel
        """Whether ranks compute different parts of one layer for the same batch."""

    def reads(self, parameter: nn.Parameter) -> bool:
        return id(parameter) in self._read

    def gradients(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """What this rank reads of each gradient: its own part, or None if there is none or another rank reads it."""
        return [
            local_part(gradient) if gradient is not None and shard.is_read else None
            for gradient, shard in zip(gradients, self.of, strict=True)
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


def _shard(parameter: nn.Parameter, rank: int, first: int) -> Shard:
    """The shard of a DTensor; any other parameter is the same on all ranks."""
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
    """The shards of FSDP with `use_orig_params=True`, whose parameters are flat pieces of one buffer."""
    for module in model.modules():
        handle = getattr(module, "_handle", None) if type(module).__name__ == "FullyShardedDataParallel" else None
        flat = getattr(handle, "flat_param", None)
        if handle is None or flat is None or getattr(flat, "_params", None) is None or not handle.uses_sharded_strategy:
            continue
        is_first = dist.get_rank() == first or not _is_copy(module)
        for parameter, shape, info in zip(flat._params, flat._shapes, flat._shard_param_infos, strict=True):
            local, start = (info.numel_in_shard, info.intra_param_start_idx) if info.in_shard else (0, 0)
            yield id(parameter), Shard(tuple(shape), (local,), (start,), is_first, is_divided=True)


def _tensor_parallel(model: nn.Module, parameters: Sequence[nn.Parameter]) -> tuple[bool, bool]:
    """Whether the model is tensor-parallel, and whether this rank trains on the batch of another one.

    Dimensions of a mesh over which FSDP2 shards are left out: there every rank has its own batch.
    """
    of_data = {name for module in model.modules() for name in _names_of_data_mesh(module)}
    is_parallel = is_twin = False
    for parameter in parameters:
        mesh: Any = getattr(parameter, "device_mesh", None)
        if mesh is None or (of_data and mesh.mesh_dim_names is None):
            continue
        names = mesh.mesh_dim_names or range(mesh.ndim)
        coordinate = mesh.get_coordinate() or [0] * mesh.ndim
        places = [place for name, place in zip(names, coordinate, strict=True) if name not in of_data]
        is_parallel |= any(mesh.size(dim) > 1 for dim, name in enumerate(names) if name not in of_data)
        is_twin |= any(places)
    return is_parallel, is_twin


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
