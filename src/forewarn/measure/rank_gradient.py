"""The gradient of one rank before DDP averages it over all ranks: a small batch to compare with the large one."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from forewarn.measure.engine.norms import Norm, norms
from forewarn.measure.module_tree import children_of
from forewarn.measure.probe import GradientTap


class RankGradient:
    """The norms of this rank's own gradients in one backward pass, read before they reach `.grad`.

    DDP averages `.grad`, so afterwards only the mean over all ranks is left. One rank is enough for the comparison: its
    gradient is as good a sample of a small batch as any other's. No rank has to wait.
    """

    def __init__(self, called: nn.Module) -> None:
        wrapper = _wrapper(called)
        self._found: weakref.ref[Any] | None = None if wrapper is None else weakref.ref(wrapper)
        """Weak, so that its group of processes ends with the loop even if the monitor is kept."""
        self._seen: dict[int, Norm] = {}

    def forward_begins(self) -> None:
        """Find the DDP wrapper if the loop calls it but the model inside is watched."""
        if self._wrapper is None and torch.distributed.is_available():
            active = getattr(nn.parallel.DistributedDataParallel, "_active_ddp_module", None)
            self._found = None if active is None else weakref.ref(active)

    @property
    def _wrapper(self) -> Any:
        return None if self._found is None else self._found()

    @property
    def num_ranks(self) -> int:
        """Number of ranks that train on their own batches."""
        wrapper = self._wrapper
        if wrapper is not None:
            return torch.distributed.get_world_size(wrapper.process_group)
        is_distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        return torch.distributed.get_world_size() if is_distributed else 1

    @property
    def is_averaged(self) -> bool:
        """Whether the current pass ends with the plain mean of all gradients over all ranks."""
        wrapper = self._wrapper
        return wrapper is not None and wrapper.require_backward_grad_sync and _averages(wrapper)

    @property
    def is_alone(self) -> bool:
        """Whether the current pass leaves each rank with its own gradients, as within `no_sync`."""
        wrapper = self._wrapper
        return wrapper is not None and not wrapper.require_backward_grad_sync

    def follow(self, live: Callable[[], Mapping[int, nn.Parameter]]) -> list[GradientTap]:
        """Taps for the backward pass that begins; `live` walks the model and is called only if needed."""
        self._seen = {}
        if self.num_ranks == 1 or not self.is_averaged:
            return []
        return [
            GradientTap(parameter, partial(self._reached, key))
            for key, parameter in live().items()
            if parameter.requires_grad
        ]

    def norms(self, filled: Collection[int]) -> Sequence[Norm]:
        """This rank's norms if they cover all parameters that have a gradient now; otherwise none.

        Otherwise the mean includes parameters that these norms lack. This rank may not have used them, or their
        gradient came before the pass reached the model's output.
        """
        own_norms, self._seen = self._seen, {}
        return list(own_norms.values()) if own_norms.keys() == set(filled) else ()

    def _reached(self, parameter: int, gradient: Tensor) -> None:
        """Read the norm at once: keeping the gradient would make torch copy it, and DDP may overwrite it."""
        if gradient.numel():
            self._seen[parameter] = norms([gradient])[0]


def _wrapper(called: nn.Module) -> Any:
    """The DistributedDataParallel wrapper, also inside torch.compile; None if there is none."""
    inner = called
    while isinstance(compiled := children_of(inner).get("_orig_mod"), nn.Module):
        inner = compiled
    return inner if isinstance(inner, nn.parallel.DistributedDataParallel) else None


def _averages(wrapper: Any) -> bool:
    """Whether DDP leaves the exact mean: no compression, no low-precision copies, no ignored parameters."""
    return not (wrapper._comm_hooks or wrapper.mixed_precision is not None or wrapper.parameters_to_ignore)
