"""Detects what was written to gradients: by a backward pass, or before the step began."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
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
            for parameter in parameters:
                if parameter.grad is not None:
                    return True
        else:
            gradients, versions_now = _written(parameters)
            if len(gradients) != len(before) or not all(map(is_, gradients, before)) or versions_now != versions:
                return True
        return any(parameter.grad is not None for parameter in self._parameter_index.unknown())


class EarlierGradients:
    """The gradients that a step found when it began; a backward pass that still finds them adds to earlier steps.

    They are not kept alive: clearing gradients frees their memory, as without the monitor.
    """

    def __init__(self) -> None:
        self._found: dict[int, tuple[weakref.ref[Tensor], int]] = {}

    def step_begins(self, parameters: Sequence[nn.Parameter]) -> None:
        self._found = {
            id(parameter): (weakref.ref(gradient), _version(gradient))
            for parameter, gradient in zip(parameters, map(_gradient_of, parameters), strict=True)
            if gradient is not None
        }

    def has(self, parameter: nn.Parameter, is_first_pass: bool) -> bool:
        """Whether a parameter holds its gradient from before the step when a backward pass begins.

        The first pass may reach parameters outside the watched module before it is noticed. Their gradients have been
        added to, so they do not count.
        """
        reference, version = self._found.get(id(parameter), (None, 0))
        gradient = parameter.grad
        if reference is None or gradient is None or reference() is not gradient:
            return False
        return not is_first_pass or _version(gradient) == version


def _version(gradient: Tensor) -> int:
    return int(_version_of(getattr(gradient, _SHARD, gradient)))


_Written = tuple[list[Tensor], list[int]]
"""Gradient tensors, held so that their ids cannot be reused, and the version of each."""


def _written(parameters: Iterable[nn.Parameter]) -> _Written:
    gradients = [gradient for gradient in map(_gradient_of, parameters) if gradient is not None]
    return gradients, [] if not gradients else [
        _version_of(getattr(gradient, _SHARD, gradient)) for gradient in gradients
    ]
