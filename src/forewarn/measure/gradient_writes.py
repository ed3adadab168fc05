"""Detects whether a backward pass has filled gradients; `torch.autograd.grad`, for example, fills none."""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter, is_

from torch import Tensor, nn

from forewarn.measure.parameters import ParameterIndex

_gradient_of, _version_of = attrgetter("grad"), attrgetter("_version")

_SHARD = "_local_tensor"
"""Where a DTensor keeps its values; FSDP2 adds to them without raising the version of the DTensor."""


class GradientWriteDetector:
    """Compares the gradients at the start and at the end of a backward pass.

    It checks the parameters in the index without walking the model. Only if none of them received a gradient does it
    look for new parameters.
    """

    def __init__(self, parameter_index: ParameterIndex) -> None:
        self._parameter_index = parameter_index
        self._before: _Written = ([], [])

    def begins(self) -> None:
        self._before = _written(self._parameter_index.parameters)

    def has_come(self) -> bool:
        """Whether a gradient is new or was written to."""
        parameters, (before, versions) = self._parameter_index.parameters, self._before
        self._before = ([], [])
        if not before:
            if any(parameter.grad is not None for parameter in parameters):
                return True
        else:
            gradients, versions_now = _written(parameters)
            if len(gradients) != len(before) or not all(map(is_, gradients, before)) or versions_now != versions:
                return True
        return any(parameter.grad is not None for parameter in self._parameter_index.unknown())


_Written = tuple[list[Tensor], list[int]]
"""Gradient tensors, held so that their ids cannot be reused, and the version of each."""


def _written(parameters: Iterable[nn.Parameter]) -> _Written:
    gradients = [gradient for gradient in map(_gradient_of, parameters) if gradient is not None]
    return gradients, [_version_of(getattr(gradient, _SHARD, gradient)) for gradient in gradients]
