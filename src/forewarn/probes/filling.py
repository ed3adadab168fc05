"""Whether a backward pass has filled gradients: `torch.autograd.grad`, for one, fills none."""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter

from torch import nn

from forewarn.probes.parameters import Roster

_gradient_of, _version_of = attrgetter("grad"), attrgetter("_version")

_SHARD = "_local_tensor"
"""Where a DTensor has its numbers; FSDP2 adds to these, and the DTensor around them does not know."""


class Filling:
    """Looks at the gradients when a backward pass begins and when it has ended.

    The parameters are those that the roster knows, so the model is not walked for it. Only where none of them has got
    anything the model is asked for others.
    """

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._before: tuple[list[int], list[int]] = ([], [])

    def begins(self) -> None:
        self._before = _written(self._roster.parameters)

    def has_come(self) -> bool:
        """Whether a gradient is there that was not, or was written to."""
        known = self._roster.parameters
        if not self._before[0]:
            if any(each.grad is not None for each in known):
                return True
        elif _written(known) != self._before:
            return True
        return any(each.grad is not None for each in self._roster.unknown())


def _written(parameters: Iterable[nn.Parameter]) -> tuple[list[int], list[int]]:
    """Which gradient tensors there are, and how often each has been written to."""
    gradients = [each for each in map(_gradient_of, parameters) if each is not None]
    return list(map(id, gradients)), [_version_of(getattr(each, _SHARD, each)) for each in gradients]
