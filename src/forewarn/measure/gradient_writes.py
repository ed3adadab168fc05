"""Whether a backward pass has filled gradients: `torch.autograd.grad`, for one, fills none."""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter, is_

from torch import Tensor, nn

from forewarn.measure.parameters import ParameterIndex

_gradient_of, _version_of = attrgetter("grad"), attrgetter("_version")

_SHARD = "_local_tensor"
"""Where a DTensor has its numbers; FSDP2 adds to these, and the DTensor around them does not know."""


class GradientWriteDetector:
    """Looks at the gradients when a backward pass begins and when it has ended.

    It looks at the parameters in the index, without a walk through the model. Only where none of them has received
    anything is the model asked for others.
    """

    def __init__(self, parameter_index: ParameterIndex) -> None:
        self._parameter_index = parameter_index
        self._before: _Written = ([], [])

    def begins(self) -> None:
        self._before = _written(self._parameter_index.parameters)

    def has_come(self) -> bool:
        """Whether a gradient is there that was not, or was written to."""
        known, (before, versions) = self._parameter_index.parameters, self._before
        self._before = ([], [])
        if not before:
            if any(each.grad is not None for each in known):
                return True
        else:
            now, versions_now = _written(known)
            if len(now) != len(before) or not all(map(is_, now, before)) or versions_now != versions:
                return True
        return any(each.grad is not None for each in self._parameter_index.unknown())


_Written = tuple[list[Tensor], list[int]]
"""Gradient tensors, held so that none takes the place of another unseen, and how often each has been written to."""


def _written(parameters: Iterable[nn.Parameter]) -> _Written:
    gradients = [each for each in map(_gradient_of, parameters) if each is not None]
    return gradients, [_version_of(getattr(each, _SHARD, each)) for each in gradients]
