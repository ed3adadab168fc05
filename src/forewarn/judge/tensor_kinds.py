"""Kinds of the tensors behind scopes: matrices, and groups of similar matrices."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from forewarn.judge.series import Bools, Floats, Panel
from forewarn.types import FrozenCause, RunInfo

T = TypeVar("T")


def is_matrix(scopes: tuple[str, ...], info: RunInfo) -> Bools:
    """Which tensors have two or more dimensions or are unknown: all but biases, norm weights and scalars.

    Vectors often start at zero, and some have no gradient by construction (a bias before a batch norm, the bias of
    attention keys). What is a fault in a matrix can be normal there.
    """
    return _is_matrix(Same(info), Same(scopes))


def matrices(marked: Bools, scopes: tuple[str, ...], info: RunInfo) -> Iterator[int]:
    """The indices that are marked and belong to a matrix."""
    return (int(index) for index in np.flatnonzero(marked & is_matrix(scopes, info))) if marked.any() else iter(())


def hold_matrices(blocks: tuple[str, ...], info: RunInfo) -> Bools:
    """Which blocks have a parameter of two or more dimensions, or are unknown."""
    return _hold_matrices(Same(info), Same(blocks))


def num_elements(scopes: tuple[str, ...], info: RunInfo) -> Floats:
    """The number of elements of each tensor, at least 1; 1 where it is unknown."""
    return _num_elements(Same(info), Same(scopes))


def in_float16(scopes: tuple[str, ...], info: RunInfo) -> Bools:
    """Which tensors are stored in float16."""
    return _in_float16(Same(info), Same(scopes))


def gain_factors(scopes: tuple[str, ...], info: RunInfo) -> tuple[Floats, Floats]:
    """For each matrix: what turns its norm into its lowest and highest possible gain.

    Which dimension is the input is known for some layers only. 0 for vectors, embeddings and unknown tensors.
    """
    return _gain_factors(Same(info), Same(scopes))


@dataclass(frozen=True, slots=True)
class Kinds:
    """Matrices grouped by kind."""

    members: tuple[NDArray[np.intp], ...]
    """For each kind, the indices of its tensors among the scopes."""
    root_counts: Floats
    """The square root of the number of elements, by scope. A norm divided by it is the root mean square."""


def kinds(scopes: tuple[str, ...], info: RunInfo, at_least: int) -> Kinds:
    """The kinds with at least `at_least` matrices."""
    return _kinds(Same(info), Same(scopes), at_least)


def copies(info: RunInfo) -> dict[str, str]:
    """The tensors that nothing trains but that have a trained twin, by name: a target network beside its original.

    Their names differ only in the name of one module, and every tensor of that module has a twin in a module that is
    trained. A part of the original may be frozen as well.
    """
    return _copies(Same(info))


def idle_copies(causes: Panel, info: RunInfo) -> dict[str, str]:
    """The copies that are meant to be copies, by name, each with its original. `causes` is `update/frozen_cause`.

    Two critics, two heads or two generators have the same tensors too. One that is missing from the optimizer gets
    gradients all the same, and one that is frozen has not begun with the values of the other.
    """
    twins = copies(info)
    if not twins:
        return twins
    forgotten = (causes.values == float(FrozenCause.NOT_IN_OPTIMIZER)).any(axis=0)
    reached = {causes.scopes[index] for index in np.flatnonzero(forgotten)}
    return {
        copy: original
        for copy, original in twins.items()
        if info.parameters[copy].copied or (info.parameters[copy].trainable and copy not in reached)
    }


_CALLED_AS_MODULES = re.compile(r"(Linear|Conv(Transpose)?[123]d|Embedding(Bag)?|LSTM|GRU|RNN|\w+Norm([123]d)?)\.")
"""Kinds of parameters that belong to layers of torch, which models call as modules."""


_SIDE_SHARE = 0.05
"""Fraction of all weights below which layers beside the path to the loss are heads that it need not use."""


def never_called(outputs: Panel, info: RunInfo) -> set[str]:
    """The parameters of layers without any output so far.

    `outputs` is any metric of layer outputs. Hooks may not see a layer of another library whose class has no output at
    all, nor any layer if none of torch's has one, as in compiled code.
    """
    called = {scope.partition("[")[0] for scope in outputs.scopes}
    kinds_called = {parameter.kind for name, parameter in info.parameters.items() if layer_of(name) in called}
    hooks_work = any(map(_CALLED_AS_MODULES.match, kinds_called))
    return {
        name
        for name, parameter in info.parameters.items()
        if layer_of(name) not in called
        and (parameter.kind in kinds_called or (hooks_work and _CALLED_AS_MODULES.match(parameter.kind)))
    }


def side_outputs(scopes: tuple[str, ...], stopped: Bools, learning: Bools, outputs: Panel, info: RunInfo) -> set[str]:
    """The parameters of small layers whose output no loss uses, such as a head that only another task needs.

    `stopped` and `learning` mark the scopes without a gradient and those with one. Such a layer ran on this step, after
    a layer that learns. What a `detach()` cuts off comes first, or is a larger part of the model. A model that
    holds its layers in a list shows no outputs; there, the order of the parameters stands for that of the layers.
    """
    sizes = num_elements(scopes, info)
    if len(outputs):
        ran = dict.fromkeys(
            outputs.scopes[index].partition("[")[0] for index in np.flatnonzero(np.isfinite(outputs.last))
        )
        learn = {layer_of(scopes[index]) for index in np.flatnonzero(learning)}
        begun = set(itertools.dropwhile(lambda layer: layer not in learn, ran)) - learn
        aside = stopped & np.array([layer_of(scope) in begun for scope in scopes], np.bool_)
    else:
        aside = stopped & np.logical_or.accumulate(learning)
    if sizes[aside].sum() >= _SIDE_SHARE * sizes.sum():
        return set()
    return {scopes[index] for index in np.flatnonzero(aside)}


def layer_widths(info: RunInfo) -> Floats:
    """The numbers of outputs that layers of this model have, in ascending order."""
    return _layer_widths(Same(info))


def layer_of(parameter: str) -> str:
    """The layer that a parameter belongs to."""
    return parameter.rpartition(".")[0]


class Same(Generic[T]):
    """Run information or scopes compared by identity, because they never change and comparing values is slow."""

    def __init__(self, value: T) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.value is other.value


@lru_cache(maxsize=16)
def _is_matrix(info: Same[RunInfo], scopes: Same[tuple[str, ...]]) -> Bools:
    shapes = (parameter.shape if (parameter := info.value.parameters.get(scope)) else None for scope in scopes.value)
    return np.array([shape is None or len(shape) >= 2 for shape in shapes], np.bool_)


@lru_cache(maxsize=16)
def _num_elements(info: Same[RunInfo], scopes: Same[tuple[str, ...]]) -> Floats:
    shapes = (parameter.shape if (parameter := info.value.parameters.get(scope)) else () for scope in scopes.value)
    return np.array([max(1, math.prod(shape)) for shape in shapes], np.float64)


@lru_cache(maxsize=16)
def _in_float16(info: Same[RunInfo], scopes: Same[tuple[str, ...]]) -> Bools:
    parameters = (info.value.parameters.get(scope) for scope in scopes.value)
    return np.array([parameter is not None and parameter.dtype == "float16" for parameter in parameters], np.bool_)


_INPUTS_SECOND = ("Linear.", "Conv1d.", "Conv2d.", "Conv3d.")
"""Layers whose weight has its inputs in the second dimension."""


@lru_cache(maxsize=16)
def _gain_factors(info: Same[RunInfo], scopes: Same[tuple[str, ...]]) -> tuple[Floats, Floats]:
    factors = np.zeros((2, len(scopes.value)))
    for place, scope in enumerate(scopes.value):
        parameter = info.value.parameters.get(scope)
        if parameter is None or len(parameter.shape) < 2 or "Embedding" in parameter.kind or 0 in parameter.shape:
            continue
        num_outputs, num_inputs, *kernel = parameter.shape
        ends = sorted((num_outputs * math.prod(kernel), num_inputs * math.prod(kernel)))
        if parameter.kind.startswith(_INPUTS_SECOND):
            ends = [num_inputs * math.prod(kernel)] * 2
        factors[:, place] = np.sqrt(np.array(ends) / math.prod(parameter.shape))
    return factors[0], factors[1]


@lru_cache(maxsize=16)
def _hold_matrices(info: Same[RunInfo], blocks: Same[tuple[str, ...]]) -> Bools:
    dimensions: dict[str, int] = {}
    for name, parameter in info.value.parameters.items():
        for block in (candidate for candidate in blocks.value if name.startswith(f"{candidate}.")):
            dimensions[block] = max(dimensions.get(block, 0), len(parameter.shape))
    return np.array([dimensions.get(block, 2) > 1 for block in blocks.value], np.bool_)


@lru_cache(maxsize=16)
def _kinds(info: Same[RunInfo], scopes: Same[tuple[str, ...]], at_least: int) -> Kinds:
    members: dict[str, list[int]] = {}
    counts = np.ones(len(scopes.value))
    for index, scope in enumerate(scopes.value):
        parameter = info.value.parameters.get(scope)
        if parameter is not None and len(parameter.shape) >= 2:
            members.setdefault(parameter.kind, []).append(index)
            counts[index] = max(1, np.prod(parameter.shape, dtype=np.float64))
    enough = tuple(np.array(indices, np.intp) for indices in members.values() if len(indices) >= at_least)
    return Kinds(enough, np.sqrt(counts))


@lru_cache(maxsize=16)
def _layer_widths(info: Same[RunInfo]) -> Floats:
    shapes = [parameter.shape for parameter in info.value.parameters.values()]
    return np.array(sorted({shape[0] for shape in shapes if len(shape) >= 2 and shape[0]}), np.float64)


@lru_cache(maxsize=16)
def _copies(info: Same[RunInfo]) -> dict[str, str]:
    trained: dict[tuple[str, tuple[int, ...]], str] = {}
    idle: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {}
    for name, parameter in info.value.parameters.items():
        module, _, inner = name.partition(".")
        if parameter.trainable and parameter.group is not None:
            trained.setdefault((inner, parameter.shape), name)
        else:
            idle.setdefault(module, {})[name] = (inner, parameter.shape)
    learning = {name.partition(".")[0] for name in trained.values()}
    frozen_beside = {key: name for module in learning for name, key in idle.get(module, {}).items()}
    twins: dict[str, str] = {}
    for module, keys in idle.items():
        also = {} if module in learning else frozen_beside
        if all(key in trained or key in also for key in keys.values()) and any(
            map(trained.__contains__, keys.values())
        ):
            twins |= {name: trained.get(key, also.get(key, "")) for name, key in keys.items()}
    return twins
