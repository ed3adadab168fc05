"""Asking metrics of tensors: built-in ones of many tensors at once, functions of one at a time, failing ones once."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from forewarn.probes.module_monitor.metrics import Metric, Metrics
from forewarn.probes.module_monitor.step_log import ELEMENTS, OWN, ROWS, StepLog
from forewarn.stats import measure

Named = tuple[str, tuple[Tensor, ...]]
"""A module's or parameter's name, its tensor, and the reference's if it is compared with one."""


class Evaluation:
    """Logs what the metrics say. A metric that raises is named once and switched off; with `strict` it raises."""

    def __init__(self, metrics: Metrics, logger: logging.Logger, strict: bool) -> None:
        self.metrics = metrics
        self._logger = logger
        self._strict = strict
        self._named: set[str] = set()

    def activation(self, log: StepLog, kind: str, name: str, *tensors: Tensor) -> None:
        """All metrics of `kind` of one activation; with a reference, its tensor comes second."""
        asked = self.metrics.of(kind, name)
        if not asked:
            return
        tensors = tuple(each.detach() for each in tensors)
        engine = [each for each in asked if each.built_in]
        if engine:
            keys = tuple((f"{kind}/{name}/{each.name}", str(each.built_in)) for each in engine)
            with self._guarded(engine[0], name):
                log.rows([keys], measure([_difference(tensors)]), ELEMENTS)
            for each, (key, _) in zip(engine, keys, strict=True):
                if each.aggregate is not None:
                    log.aggregate_rows(key, each.aggregate)
        for metric in asked:
            if not metric.built_in:
                with self._guarded(metric, name):
                    result = _called(metric, tensors)
                    log.tensor(f"{kind}/{name}/{metric.name}", result, metric.aggregate)

    def parameters(self, log: StepLog, kind: str, prefix: str, named: Iterable[Named]) -> None:
        """All metrics of `kind` of parameters or gradients, under keys that begin with `prefix`."""
        keys: dict[str, list[tuple[tuple[str, str], ...]]] = {OWN: [], ROWS: []}
        wanted: dict[str, list[Tensor]] = {OWN: [], ROWS: []}
        for name, tensors in named:
            asked = self.metrics.of(kind, name)
            if not asked:
                continue
            sharded, tensors = is_sharded(tensors[0]), tuple(map(local, tensors))
            engine = tuple((f"{prefix}/{name}/{each.name}", each.built_in) for each in asked if each.built_in)
            if engine:
                how = ROWS if sharded else OWN
                keys[how].append(engine)
                wanted[how].append(_difference(tensors))
            for metric in asked:
                if not metric.built_in:
                    self._ask(log, metric, f"{prefix}/{name}/{metric.name}", name, tensors, sharded)
        for how, tensors_of in wanted.items():
            if tensors_of:
                log.rows(keys[how], measure(tensors_of), how)

    def _ask(
        self, log: StepLog, metric: Metric, key: str, name: str, tensors: tuple[Tensor, ...], sharded: bool
    ) -> None:
        with self._guarded(metric, name):
            if sharded and metric.reduce is None:
                raise ValueError(
                    f"{name} is sharded, and the metric does not say how the values of shards make that of the whole; "
                    "add it with reduce='l2', 'mean', 'sum' or 'max', or use a built-in metric"
                )
            if sharded and not tensors[0].numel():
                log.number(key, float("nan"), 0.0, str(metric.reduce))  # an empty shard has no say
                return
            result = _called(metric, tensors)
            if isinstance(result, Tensor) and result.numel() != 1:
                raise TypeError(f"it returned a tensor of shape {tuple(result.shape)}; one number is expected")
            if sharded:
                log.number(key, result, float(tensors[0].numel()), str(metric.reduce))
            else:
                log.number(key, result)

    def failed(self, key: str, error: Exception) -> None:
        """Tell once that what was logged under a key is lost."""
        if self._strict:
            raise RuntimeError(f"the aggregation function of {key} failed: {error}") from error
        if key not in self._named:
            self._named.add(key)
            self._logger.warning("the aggregation function of %s failed: %s; it is left out", key, _told(error))

    def _guarded(self, metric: Metric, name: str) -> _Guard:
        return _Guard(self, metric, name)

    def give_up(self, metric: Metric, name: str, error: Exception) -> None:
        what = f"{metric.kind} metric {metric.name!r} failed on {name}"
        if self._strict:
            raise RuntimeError(f"{what}: {_told(error)}") from error
        self._logger.warning("%s: %s; it is switched off and training goes on", what, _told(error))
        self.metrics.switch_off(metric)


class _Guard:
    """No gradient is recorded within, and an exception is the metric's end, not the training's."""

    def __init__(self, evaluation: Evaluation, metric: Metric, name: str) -> None:
        self._evaluation, self._metric, self._name = evaluation, metric, name
        self._no_grad = torch.no_grad()

    def __enter__(self) -> None:
        self._no_grad.__enter__()

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        self._no_grad.__exit__(kind, error, trace)
        if not isinstance(error, Exception):
            return False
        self._evaluation.give_up(self._metric, self._name, error)
        return True


def is_sharded(tensor: Tensor) -> bool:
    """Whether this process holds only a part of a tensor."""
    return any(each.is_shard() for each in getattr(tensor, "placements", ()))


def local(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _called(metric: Metric, tensors: Sequence[Tensor]) -> Tensor | float:
    assert callable(metric.fn)
    result = metric.fn(*tensors)
    if not isinstance(result, Tensor | Real):
        raise TypeError(f"it returned {type(result).__name__}; a tensor or a number is expected")
    if isinstance(result, Tensor) and _shares_memory(result, tensors):
        return result.clone()  # a part of a tensor that the next module may change in place
    return result


def _shares_memory(result: Tensor, tensors: Sequence[Tensor]) -> bool:
    where = result.untyped_storage().data_ptr()
    return any(where == each.untyped_storage().data_ptr() for each in tensors)


def _difference(tensors: Sequence[Tensor]) -> Tensor:
    """What a built-in metric is asked of: the tensor, or its difference from the reference."""
    with torch.no_grad():
        return tensors[0].detach() if len(tensors) == 1 else tensors[0] - tensors[1]


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
