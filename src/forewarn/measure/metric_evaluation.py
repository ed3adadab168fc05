"""Evaluates metrics on tensors: built-in metrics on many tensors at once, functions on one at a time."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from forewarn.measure.engine import Measurement, measure
from forewarn.measure.engine.memory import is_dense
from forewarn.measure.metric_kinds import NOTHING, Keys, Metrics, ModuleMetric
from forewarn.measure.probes.loss import TAKE_A_PART
from forewarn.measure.ranks import ELEMENTS, OWN, ROWS
from forewarn.measure.shards import Shard
from forewarn.measure.step_log import Settled, StepLog

Named = tuple[str, tuple[Tensor, ...]]
"""The name of a module or parameter, its tensor, and the reference's tensor if there is one."""


_WHOLE = (nn.Parameter, Tensor)
_NUMBERS = (Tensor, Real)


class Evaluation:
    """Logs the values of metrics. A metric that raises is reported once and switched off; with `strict` it raises."""

    def __init__(self, metrics: Metrics, logger: logging.Logger, strict: bool = False) -> None:
        self.metrics = metrics
        self.logger = logger
        self.log = StepLog()
        """The values logged in the current step."""
        self.shards: Mapping[str, Shard] = {}
        """By name, the part of each parameter that this rank holds; where it is unknown, DTensors tell it."""
        self._strict = strict
        self._named: set[str] = set()
        self._last: tuple[ref[Tensor], int, Measurement] | None = None
        """The activation read last (a weak reference), its version, and its statistics."""

    def take_log(self) -> StepLog:
        """The log of the step that ends now."""
        log, self.log = self.log, StepLog()
        return log

    def activation(self, kind: str, name: str, *tensors: Tensor, reference: nn.Module | None = None) -> None:
        """Evaluate all metrics of `kind` on one activation; with a reference, its tensor comes second."""
        asked = self.metrics.asked(kind, name, reference=reference)
        if asked is NOTHING:
            return
        if asked.built_in:
            try:
                self.log.rows((asked.built_in,), self._measured(tensors), ELEMENTS)
                for key, aggregate in asked.aggregates:
                    self.log.aggregate_rows(key, aggregate)
            except Exception as error:
                for metric in self.metrics.built_in(kind, name, reference):
                    self._give_up(metric, name, error)
        if not asked.functions:
            return
        with torch.no_grad():
            detached = tuple(local(tensor).detach() for tensor in tensors)
            for key, metric in asked.functions:
                try:
                    self.log.tensor(key, _called(metric, detached), metric.aggregate)
                except Exception as error:
                    self._give_up(metric, name, error)

    def _measured(self, tensors: tuple[Tensor, ...]) -> Measurement:
        """The engine's statistics of an activation, read once if a module returns its last child's output."""
        tensor = tensors[0]
        if len(tensors) > 1 or tensor.is_inference():  # inference tensors do not count their versions
            return measure((_readable(tensors),))
        if self._last is None or self._last[0]() is not tensor or self._last[1] != tensor._version:
            self._last = (ref(tensor), tensor._version, measure((_readable(tensors),)))
        return self._last[2]

    def forget(self) -> None:
        """Forget the last activation at the end of a forward pass."""
        self._last = None

    def parameters(
        self, kind: str, named: Iterable[Named], prefix: str = "", reference: nn.Module | None = None
    ) -> None:
        """Evaluate all metrics of `kind` on parameters or gradients; keys begin with `prefix`, by default the kind."""
        if not self.metrics.any(kind):
            return
        engine: dict[str, tuple[list[Keys], list[Tensor]]] = {OWN: ([], []), ROWS: ([], [])}
        with torch.no_grad():
            for name, tensors in named:
                asked = self.metrics.asked(kind, name, prefix, reference)
                if asked is NOTHING:
                    continue
                shard = self.shards.get(name)
                sharded = is_sharded(tensors[0]) if shard is None else shard.is_divided
                local_tensors = tuple(map(local, tensors))
                if sharded and shard is not None:
                    local_tensors = tuple(map(shard.counted, local_tensors))
                if asked.built_in:
                    keys, to_measure = engine[ROWS if sharded else OWN]
                    keys.append(asked.built_in)
                    to_measure.append(local_tensors[0] if len(local_tensors) == 1 else _readable(local_tensors))
                for key, metric in asked.functions:
                    try:
                        self._ask(metric, key, local_tensors, sharded)
                    except Exception as error:
                        self._give_up(metric, name, error)
            for how, (keys, to_measure) in engine.items():
                if to_measure:
                    in_one_piece = all(map(Tensor.is_contiguous, to_measure))
                    measurement = measure(
                        to_measure if in_one_piece else [_readable((tensor,)) for tensor in to_measure]
                    )
                    self.log.rows(keys, measurement, how)

    def _ask(self, metric: ModuleMetric, key: str, tensors: tuple[Tensor, ...], sharded: bool) -> None:
        if sharded and metric.reduce is None:
            raise ValueError(
                "the tensor is sharded, and the metric does not say how to combine the values of its shards; "
                "add it with reduce='l2', 'mean', 'sum' or 'max', or use a built-in metric"
            )
        if sharded and not tensors[0].numel():
            self.log.number(key, float("nan"), 0.0, str(metric.reduce))  # an empty shard does not count
            return
        result = _called(metric, tensors)
        if isinstance(result, Tensor) and result.numel() != 1:
            raise TypeError(f"it returned a tensor of shape {tuple(result.shape)}; expected one number")
        if sharded:
            self.log.number(key, result, float(tensors[0].numel()), str(metric.reduce))
        else:
            self.log.number(key, result)

    def averages(self, settled: Settled) -> dict[str, float]:
        """The value of each key of a step; a failed aggregation function is reported once."""
        for key, error in settled.failures.items():
            shown = key.replace(self.metrics.separator, "/")
            if self._strict:
                raise RuntimeError(f"the aggregation function of {shown} failed: {error}") from error
            if key not in self._named:
                self._named.add(key)
                self.logger.warning("the aggregation function of %s failed: %s; it is left out", shown, _told(error))
        return settled.averages()

    def _give_up(self, metric: ModuleMetric, name: str, error: Exception) -> None:
        message = f"{metric.kind} metric {metric.name!r} failed on {name}"
        if self._strict:
            raise RuntimeError(f"{message}: {_told(error)}") from error
        self.logger.warning("%s: %s; it is switched off and training goes on", message, _told(error))
        self.metrics.switch_off(metric)


def is_sharded(tensor: Tensor) -> bool:
    """Whether this process holds only a part of a tensor."""
    if type(tensor) in _WHOLE:  # a failing hasattr on these is slow
        return False
    if not hasattr(tensor, "placements"):
        return False
    mesh: Any = tensor.device_mesh  # type: ignore[attr-defined]
    return any(placement.is_shard() and mesh.size(dim) > 1 for dim, placement in enumerate(tensor.placements))


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this process holds; one that is still on its way from other ranks, once it is there."""
    if type(tensor) in _WHOLE:
        return tensor
    part = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part.trigger_wait() if hasattr(part, "trigger_wait") else part


def _called(metric: ModuleMetric, tensors: Sequence[Tensor]) -> Tensor | float:
    assert callable(metric.fn)
    result = metric.fn(*tensors)
    if not isinstance(result, _NUMBERS):
        raise TypeError(f"it returned {type(result).__name__}; expected a tensor or a number")
    if isinstance(result, Tensor) and result.is_complex():
        raise TypeError(f"it returned a tensor of {result.dtype}, but a reading is a real number; {TAKE_A_PART}")
    if isinstance(result, Tensor) and _shares_memory(result, tensors):
        return result.clone()  # a part of a tensor that the next module may change in place
    return result


def _shares_memory(result: Tensor, tensors: Sequence[Tensor]) -> bool:
    address = result.untyped_storage().data_ptr()
    return address in [tensor.untyped_storage().data_ptr() for tensor in tensors]


def _readable(tensors: Sequence[Tensor]) -> Tensor:
    """The tensor for a built-in metric: the given one, or its difference from the reference.

    A tensor scattered in host memory, such as one of several heads, is copied: that is faster than reading it in place.
    """
    tensor = tensors[0] if len(tensors) == 1 else tensors[0].detach() - tensors[1].detach()
    scattered = tensor.is_cpu and tensor.layout is torch.strided and not is_dense(tensor)
    return tensor.detach().contiguous() if scattered else tensor


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
