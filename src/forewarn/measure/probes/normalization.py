"""Batch normalization: whether its running statistics still follow the data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer

from forewarn.measure.engine import in_order, measure
from forewarn.measure.module_tree import clean_name, named_modules
from forewarn.measure.parameters import ParameterIndex
from forewarn.measure.probe import Array, Pending, Probe, Reading
from forewarn.measure.step import Step
from forewarn.types import BatchNormState

_SUMS = slice(1, 5)
"""Sum, sum of squares, min and max: any change shows in at least one of them."""


class BatchNormProbe(Probe):
    """`activation/batchnorm_state` per batch normalization layer, read just before the optimizer steps.

    It needs no hook, so it also works for models left in evaluation mode and for compiled ones.
    """

    name = "batchnorm"
    only_measured = True

    def __init__(self, parameter_index: ParameterIndex) -> None:
        self._parameter_index = parameter_index
        self._known: tuple[int, dict[str, _NormBase]] | None = None
        """Every batch norm, with the version of the parameter index: finding them takes a walk over all modules."""
        self._modes: dict[str, BatchNormState] = {}
        self._norms: dict[str, _NormBase] = {}
        self._before: dict[str, Array] = {}
        """Statistics of the running statistics at the last measured step."""

    def before_update(self, index: int, optimizer: Optimizer, step: Step, closure: bool) -> None:
        if not step.measured:
            return
        if self._known is None or self._known[0] != self._parameter_index.version:
            self._known = self._parameter_index.version, dict(_batch_norms(self._parameter_index.model))
        for name, norm in self._known[1].items():
            self._norms[name] = norm
            self._modes[name] = _mode(norm)

    def collect(self, step: Step) -> Pending | None:
        norms, self._norms = self._norms, {}
        modes, self._modes = self._modes, {}
        if not norms:
            return None
        running = [tensor for norm in norms.values() for tensor in (norm.running_mean, norm.running_var)]
        measurement = measure(running)

        def decode(arrays: Sequence[Array]) -> Iterator[Reading]:
            rows = in_order(measurement.order, arrays)[:, _SUMS].reshape(len(norms), -1)
            states = []
            for row, (name, mode) in zip(rows, modes.items(), strict=True):
                still = name in self._before and np.array_equal(row, self._before[name], equal_nan=True)
                stuck = mode is BatchNormState.FOLLOWS and still
                states.append(BatchNormState.STANDS_STILL if stuck else mode)
                self._before[name] = row
            yield Reading("activation/batchnorm_state", tuple(modes), [float(state) for state in states])

        return Pending(measurement.rows, decode)

    def state_dict(self) -> dict[str, Any]:
        return {"scopes": list(self._before), "before": [row.copy() for row in self._before.values()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        rows = (np.array(row, np.float64) for row in state["before"])
        self._before = dict(zip(state["scopes"], rows, strict=True))


def _batch_norms(model: nn.Module) -> Iterator[tuple[str, _NormBase]]:
    for path, module in named_modules(model):
        if isinstance(module, _NormBase) and module.running_mean is not None:
            yield clean_name(f"{path}.").removesuffix(".") or type(module).__name__, module


def _mode(norm: _NormBase) -> BatchNormState:
    """Evaluation mode counts as deliberate if the layer's weights are frozen too, otherwise as an oversight."""
    if norm.training:
        return BatchNormState.FOLLOWS
    weights = list(norm.parameters(recurse=False))
    frozen = bool(weights) and not any(weight.requires_grad for weight in weights)
    return BatchNormState.ON_PURPOSE if frozen else BatchNormState.IN_EVALUATION
