"""The gradient of one rank before DDP averages it with those of the others: a small batch beside the large one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from forewarn.measure.engine.norms import Norm, norms
from forewarn.measure.probe import GradientTap


class RankGradient:
    """The norms of this rank's own gradients in one backward pass, seen on their way into `.grad`.

    DDP averages what has arrived there, so afterwards only the mean of all ranks is left. One rank suffices to compare
    the two: its own gradient is as good a sample of a small batch as any other's, and no rank has to wait for it.
    """

    def __init__(self, called: nn.Module) -> None:
        self._called = called
        self._seen: dict[int, Norm] = {}

    @property
    def num_ranks(self) -> int:
        """Ranks that train on batches of their own."""
        wrapper = _wrapper(self._called)
        if wrapper is not None:
            return torch.distributed.get_world_size(wrapper.process_group)
        several = torch.distributed.is_available() and torch.distributed.is_initialized()
        return torch.distributed.get_world_size() if several else 1

    @property
    def is_averaged(self) -> bool:
        """Whether the pass under way ends with the plain mean over all ranks, of all gradients."""
        wrapper = _wrapper(self._called)
        return wrapper is not None and wrapper.require_backward_grad_sync and _averages(wrapper)

    @property
    def is_alone(self) -> bool:
        """Whether the pass under way leaves each rank with its own gradients, as within `no_sync`."""
        wrapper = _wrapper(self._called)
        return wrapper is not None and not wrapper.require_backward_grad_sync

    def follow(self, live: Callable[[], Mapping[int, nn.Parameter]]) -> list[GradientTap]:
        """Whose gradients to see in the backward pass that begins; `live` walks the model, if there is a use for it."""
        self._seen = {}
        if self.num_ranks == 1 or not self.is_averaged:
            return []
        return [GradientTap(each, partial(self._reached, key)) for key, each in live().items() if each.requires_grad]

    def norms(self, filled: Collection[int]) -> Sequence[Norm]:
        """Those of this rank, if they are of all parameters that have a gradient now; else none.

        A parameter that this rank did not use, or that got its gradient before the pass came through the model's
        output, is in the mean and not among them.
        """
        seen, self._seen = self._seen, {}
        return list(seen.values()) if seen.keys() == set(filled) else ()

    def _reached(self, parameter: int, gradient: Tensor) -> None:
        """Read at once: to keep the gradient would make torch copy it, and DDP may write over it."""
        if gradient.numel():
            self._seen[parameter] = norms([gradient])[0]


def _wrapper(called: nn.Module) -> Any:
    """The DistributedDataParallel that is called, also inside torch.compile; None if there is none."""
    inner = called
    while isinstance(compiled := getattr(inner, "_orig_mod", None), nn.Module):
        inner = compiled
    return inner if isinstance(inner, nn.parallel.DistributedDataParallel) else None


def _averages(wrapper: Any) -> bool:
    """Whether what DDP leaves is the mean of what went in: not compressed, not of copies, nothing left out."""
    return not (wrapper._comm_hooks or wrapper.mixed_precision is not None or wrapper.parameters_to_ignore)
