"""The batch itself: the scale of its inputs, whether it is the one before, and how many classes its targets have."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from forewarn.measure.engine import Numbers
from forewarn.measure.engine.host_arrays import host_array
from forewarn.measure.engine.portable import wide
from forewarn.measure.forward import hookable_modules
from forewarn.measure.module_tree import children_of
from forewarn.measure.nested import nested_tensors
from forewarn.measure.over_ranks import How, Part
from forewarn.measure.peers import num_ranks
from forewarn.measure.probe import ONE, Array, ModuleTap, Pending, Probe, Reading
from forewarn.measure.shards import local_part
from forewarn.measure.step import Step

_MAX_VALUES = 2**14
"""Maximum number of values read from a batch; above that, evenly spaced ones."""

_WEIGHTS = 97
"""Values are weighted by their place modulo this prime, so that another order gives another sum."""

_MAX_CLASSES = 1024
"""With several ranks, the targets of each class up to this number are counted, 8 kB per measured step."""

_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.RNNBase, nn.MultiheadAttention)
"""Layers of torch that multiply their input with a matrix, whatever it is parametrized by."""


@dataclass(frozen=True, slots=True)
class GivenTargets:
    """Whether the targets of this step were given to the monitor."""

    were_given: bool


class BatchProbe(Probe):
    """`batch/…` on measured steps: from the first layer that runs, the model's arguments and `monitor.batch`."""

    name = "batch"
    only_measured = True
    on_every_rank = True
    provides = (GivenTargets,)

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._modules: dict[str, nn.Module] = {}
        self._tapped = ""
        self._taps: list[ModuleTap] = []
        """For these modules and this layer."""
        self._layer = ""
        self._scale: Numbers | None = None
        self._prints: list[Numbers] = []
        """Of the inputs of every pass of the step: a game has many, and often begins all in the same state."""
        self._was_given = False
        self._before: tuple[float, ...] = ()
        self._targets: Numbers | None = None

    def give(self, inputs: Any, targets: Any) -> None:
        """Keep what identifies the inputs and counts the targets of the step that ends next."""
        if (tensor := _first(inputs)) is not None:
            self._prints, self._was_given = [_fingerprint(tensor)], True
        if (tensor := _first(targets)) is not None and not tensor.is_floating_point():
            self._targets = count_targets(tensor)

    def inputs_given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._was_given and (tensor := _first((args, kwargs))) is not None:
            self._prints.append(_fingerprint(tensor))

    def module_taps(self) -> Sequence[ModuleTap]:
        modules = hookable_modules(self._model)
        if modules is not self._modules or self._layer != self._tapped:
            self._modules, self._tapped = modules, self._layer
            self._taps = [
                ModuleTap(module, entered=self._entering(name))
                for name, module in modules.items()
                if self._layer in ("", name) and multiplies_input(module)
            ]
        return self._taps

    def _entering(self, name: str) -> Any:
        def entered(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            tensor = local_part(args[0]) if args and isinstance(args[0], Tensor) else None
            if self._scale is None and tensor is not None and tensor.is_floating_point() and tensor.numel():
                self._layer, self._scale = name, _scale(_sample(tensor))

        return entered

    def collect(self, step: Step) -> Pending | None:
        scale, fingerprint, targets = self._scale, _sum(self._prints), self._targets
        layer = self._layer
        self._scale = self._targets = None
        self._prints, self._was_given = [], False
        if not step.measured:
            return None
        step.provide(GivenTargets(targets is not None))
        if scale is None:
            self._layer = ""  # another layer may come first now
        parts = {
            Part(How.MEAN, f"scale {layer}"): scale,
            Part(How.OWN, "fingerprint"): fingerprint,
            Part(How.TARGETS, "targets", once=True): targets,
        }
        given = {part: tensor for part, tensor in parts.items() if tensor is not None}

        def decode(arrays: Sequence[Array]) -> Iterator[Reading]:
            waiting = list(arrays)
            if scale is not None:
                mean, mean_square = waiting.pop(0)
                yield Reading("batch/input_mean", (layer,), mean)
                yield Reading("batch/input_rms", (layer,), math.sqrt(mean_square))
            if fingerprint is not None:
                present = tuple(float(number) for number in waiting.pop(0))
                if self._before:
                    yield Reading("batch/repeated", ONE, present == self._before)
                self._before = present
            if targets is not None:
                yield from target_readings(waiting.pop(0))

        return Pending(list(given.values()), decode, list(given)) if given else None

    def state_dict(self) -> dict[str, Any]:
        return {"before": list(self._before)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._before = tuple(float(number) for number in state["before"])


def multiplies_input(module: nn.Module) -> bool:
    """Whether a module multiplies its input with a matrix of its own.

    The first to run sees the batch as the model does, after any scaling in `forward`. A model with a matrix beside its
    layers, such as one of positions, leaves that to the first layer. No one calls a list of parameters, but its owner.
    """
    if isinstance(module, _LAYERS):
        return True
    if isinstance(module, nn.Embedding | nn.EmbeddingBag | nn.ParameterList | nn.ParameterDict):
        return False
    children = children_of(module).values()
    holders = [module, *(child for child in children if isinstance(child, nn.ParameterList | nn.ParameterDict))]
    held = [parameter for holder in holders for parameter in holder._parameters.values() if parameter is not None]
    has_matrix = any(not is_lazy(parameter) and parameter.dim() > 1 for parameter in held)
    return has_matrix and not any(map(multiplies_input, children))


def count_targets(targets: Tensor | NDArray[Any]) -> Numbers:
    """Number of targets, number of different ones, and the middle one in order.

    With several ranks also the number of each class, from which these follow for all ranks, and of all others.
    """
    array = targets if isinstance(targets, np.ndarray) else host_array(targets)
    if array is not None:
        in_order = np.sort(array, axis=None)
        num_different = np.count_nonzero(in_order[1:] != in_order[:-1]) + 1
        summary = np.array([len(in_order), num_different, in_order[len(in_order) // 2]], np.float64)
        if num_ranks() == 1:
            return summary
        per_class = np.diff(np.searchsorted(in_order, np.arange(_MAX_CLASSES + 1)))
        return np.concatenate([summary, per_class, [len(in_order) - per_class.sum()]])
    assert isinstance(targets, Tensor)
    ordered = targets.detach().flatten().sort().values
    different = (ordered[1:] != ordered[:-1]).sum() + 1
    middle = ordered[len(ordered) // 2]
    counted = torch.stack([torch.full_like(middle, len(ordered)), different.to(middle.dtype), middle])
    if num_ranks() == 1:
        return counted
    edges = torch.searchsorted(ordered.long(), torch.arange(_MAX_CLASSES + 1, device=ordered.device))
    of_classes = edges.diff()
    return torch.cat([counted, of_classes, len(ordered) - of_classes.sum(dim=0, keepdim=True)]).to(wide(counted.device))


def target_readings(counted: Array) -> Iterator[Reading]:
    """The readings of what `count_targets` returned."""
    summary, of_classes, others = counted[:3].copy(), counted[3:-1], counted[3:][-1:]
    if len(of_classes) and others == 0:
        summary[1] = np.count_nonzero(of_classes)
        summary[2] = np.searchsorted(np.cumsum(of_classes), summary[0] // 2, side="right")
    for name, value in zip(("num_targets", "num_classes", "middle_class"), summary, strict=True):
        yield Reading(f"batch/{name}", ONE, value)


def _sum(prints: Sequence[Numbers]) -> Numbers | None:
    """The fingerprint of several batches together; None if they are not on one device."""
    if len({(type(one), getattr(one, "device", None)) for one in prints}) != 1:
        return None
    return sum(prints[1:], prints[0])


def _first(given: Any) -> Tensor | None:
    """The first tensor with values in a nest of them."""
    tensors = (tensor for _, tensor in nested_tensors(given) if not tensor.is_nested and not tensor.is_meta)
    return next((tensor for tensor in tensors if tensor.numel() > 1 and not tensor.is_complex()), None)


def _sample(tensor: Tensor) -> Tensor | NDArray[np.float64]:
    """Evenly spaced values, as floats."""
    if (array := host_array(tensor)) is not None:
        flat = array.reshape(-1)
        return flat[:: -(-len(flat) // _MAX_VALUES)].astype(np.float64)
    with torch.no_grad():
        values = tensor.detach().flatten()
        return values[:: -(-len(values) // _MAX_VALUES)].to(wide(tensor.device))


def _scale(values: Tensor | NDArray[np.float64]) -> Numbers:
    """The mean of some values, and that of their squares."""
    if isinstance(values, np.ndarray):
        return np.array([values.mean(), np.square(values).mean()], np.float64)
    return torch.stack([values.mean(), values.square().mean()])


def _fingerprint(tensor: Tensor) -> Numbers:
    """Numbers that are equal for equal batches, and hardly ever otherwise."""
    values = _sample(tensor)
    if isinstance(values, np.ndarray):
        return np.array([values.sum(), (values * _places(len(values))).sum(), np.square(values).sum()], np.float64)
    places = torch.arange(len(values), device=values.device) % _WEIGHTS + 1
    return torch.stack([values.sum(), (values * places).sum(), values.square().sum()])


@lru_cache(maxsize=4)
def _places(num_values: int) -> NDArray[np.float64]:
    return (np.arange(num_values) % _WEIGHTS + 1).astype(np.float64)
