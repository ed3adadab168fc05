"""Whether two optimizers move the same parameters with the same gradients."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from itertools import chain, combinations
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from forewarn.measure.parameters import ParameterIndex
from forewarn.measure.probe import ONE, Pending, Probe, Reading
from forewarn.measure.step import Step

Used = tuple[int, "weakref.ref[Tensor]", int]
"""The id of an optimizer, and the gradient that it stepped with: the tensor and its version."""


class SharingProbe(Probe):
    """`update/shared_tensors` on measured steps with several optimizers, also with some that are not watched.

    A backward pass between two steps makes other gradients: then each optimizer has a loss of its own, as in an
    adversarial autoencoder. So a parameter counts only if both stepped with the very same gradient.
    """

    name = "sharing"
    only_measured = True

    def __init__(self, parameter_index: ParameterIndex) -> None:
        self._parameter_index = parameter_index
        self._others: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        """Optimizers that are not watched and have stepped with watched parameters."""
        self._used: dict[int, Used] = {}
        """By id of a parameter: what it was last moved with in this step."""
        self._shared: set[int] = set()
        """The ids of the parameters that were moved twice with the same gradient in this step."""

    def before_update(self, index: int, optimizer: Optimizer, step: Step, closure: bool) -> None:
        if not closure and (len(self._parameter_index.optimizers) > 1 or self._others):
            self._see(optimizer)

    def before_other_update(self, optimizer: Optimizer) -> None:
        watched = self._parameter_index.optimizers
        if any(_is_part(optimizer, own) or _is_part(own, optimizer) for own in watched):
            return
        held = chain.from_iterable(_keys(own) for own in watched)
        if not _keys(optimizer).isdisjoint(held):
            self._others.add(optimizer)
            self._see(optimizer)

    def _see(self, optimizer: Optimizer) -> None:
        contested = self._contested()
        for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            gradient = parameter.grad if id(parameter) in contested else None
            if gradient is None:
                continue
            if (before := self._used.get(id(parameter))) is not None and _is_reused(before, optimizer, gradient):
                self._shared.add(id(parameter))
            self._used[id(parameter)] = (id(optimizer), weakref.ref(gradient), gradient._version)

    def _contested(self) -> set[int]:
        """The ids of the parameters in two of the optimizers."""
        keys = [_keys(optimizer) for optimizer in (*self._parameter_index.optimizers, *self._others)]
        return set(chain.from_iterable(one & other for one, other in combinations(keys, 2)))

    def collect(self, step: Step) -> Pending | None:
        shared, self._shared, self._used = self._shared, set(), {}
        if not step.measured or not (self._others or len(self._parameter_index.optimizers) > 1):
            return None

        def decode(_: Any) -> Iterator[Reading]:
            yield Reading("update/shared_tensors", ONE, len(shared))

        return Pending(decode=decode)


def _is_reused(used: Used, optimizer: Optimizer, gradient: Tensor) -> bool:
    """Whether another optimizer has stepped with this gradient, and nothing has changed it since."""
    other, reference, version = used
    return other != id(optimizer) and reference() is gradient and version == gradient._version


def _keys(optimizer: Optimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def _is_part(inner: Optimizer, outer: Optimizer) -> bool:
    """Whether an optimizer steps another one that it has, or is the same one in a wrapper that shares its groups."""
    if set(map(id, inner.param_groups)) & set(map(id, outer.param_groups)):
        return True
    return any(value is inner for value in _nested(vars(outer).values()))


def _nested(values: Iterable[Any]) -> Iterator[Any]:
    """The values, and those in lists, tuples and dicts among them."""
    for value in values:
        yield value
        yield from value if isinstance(value, list | tuple) else value.values() if type(value) is dict else ()
