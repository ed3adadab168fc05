"""Metrics of the user's own in a watched run: the same questions that a `ModuleMonitor` asks."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer

from forewarn.measure.comparison import Comparison
from forewarn.measure.forward import hookable_modules
from forewarn.measure.metric_evaluation import Evaluation, is_sharded
from forewarn.measure.metric_kinds import (
    NOTHING,
    ActivationDifferenceMetric,
    Metrics,
    ModuleMetric,
    ParameterDifferenceMetric,
)
from forewarn.measure.module_outputs import ROOT, tensors_in
from forewarn.measure.parameters import ParameterIndex
from forewarn.measure.probe import Array, ModuleTap, Pending, Probe, Reading
from forewarn.measure.probes.stepping import Stepping
from forewarn.measure.step import Step
from forewarn.measure.step_log import StepLog
from forewarn.types import is_metric_name

_SEPARATOR = "\n"
"""Between the parts of a key; no name of a module or metric has it."""


class MetricsProbe(Probe):
    """`{kind}_metric/{name}` per module or parameter, for each metric that `watch(metrics=[…])` was given.

    Activations are those of the measured forward passes in training mode, gradients those that the optimizer uses,
    parameters those after the step; differences are those from the metric's own reference.
    """

    name = "metrics"

    def __init__(self, parameter_index: ParameterIndex, metrics: Sequence[ModuleMetric]) -> None:
        self._parameter_index = parameter_index
        self._given = tuple(metrics)
        self._metrics = Metrics(_SEPARATOR)
        for each in metrics:
            _check(each)
            self._metrics.add(each)
        self._check_whole()
        self.needs = {Stepping: [series_name(metric) for metric in metrics if metric.kind == "gradient"]}
        self._evaluation = Evaluation(self._metrics, logging.getLogger("forewarn"), strict=False)
        self._log = StepLog()
        self._comparisons = [
            Comparison(several, _SEPARATOR, parameter_index, reference) for reference, several in _by_reference(metrics)
        ]

    def module_taps(self) -> Sequence[ModuleTap]:
        running = [each for each in self._comparisons if each.runs]
        if not running and not self._metrics.any("activation"):
            return ()
        reachable = hookable_modules(self._parameter_index.called)
        places = [ModuleTap(module, left=self._leaving(name)) for name, module in reachable.items() if name]
        return [*(ModuleTap(self._parameter_index.called, entered=each.run) for each in running), *places]

    def forward_ended(self, output: Any) -> None:
        self._returned(ROOT, output)
        self._evaluation.forget()
        for each in self._comparisons:
            each.forget()

    def before_update(self, at: int, optimizer: Optimizer, step: Step, closure: bool) -> None:
        if step.measured and not closure:
            self._ask_gradients(at, getattr(optimizer, "grad_scale", None))

    def after_update(self, at: int, optimizer: Optimizer, step: Step, closure: bool) -> None:
        if step.measured and closure:
            self._ask_gradients(at, None)

    def collect(self, step: Step) -> Pending | None:
        if step.measured:
            self._ask_parameters()
        if not self._log:
            return None
        log, self._log = self._log, StepLog()
        packed = log.pack()

        def decode(arrays: Sequence[Array]) -> Iterator[Reading]:
            settled, stepping = packed.unpack(arrays), step.get(Stepping)
            for key, error in settled.failures.items():
                self._evaluation.failed(key.replace(_SEPARATOR, "/"), error)
            found: dict[str, dict[str, float]] = {}
            for key, value in settled.averages().items():
                kind, scope, metric = key.split(_SEPARATOR, 2)
                if kind != "gradient" or (stepping is not None and not stepping.skipped):
                    found.setdefault(self._series(kind, metric), {})[scope] = value
            for name, values in found.items():
                yield Reading(name, tuple(values), list(values.values()))

        return Pending(packed.tensors, decode)

    def state_dict(self) -> dict[str, Any]:
        return {"at_first": {name: weights.float().cpu().numpy() for name, weights in self._at_first().items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        at_first = self._at_first()
        for name, weights in state["at_first"].items():
            known = at_first.get(name)
            if known is not None and tuple(known.shape) == tuple(weights.shape):
                known.copy_(_tensor(weights))

    def _series(self, kind: str, answer: str) -> str:
        """The series of a metric, and behind it what its aggregation added: `spread[max]` is `spread_max`."""
        metric = max((each for each in self._given if each.kind == kind and answer.startswith(each.name)), key=_length)
        suffix = re.sub(r"[^A-Za-z0-9.]+", "_", answer[len(metric.name) :]).strip("_.")
        return f"{series_name(metric)}_{suffix}" if suffix else series_name(metric)

    def _leaving(self, name: str) -> Callable[..., None]:
        return lambda args, kwargs, output: self._returned(name, output)

    def _returned(self, name: str, output: Any) -> None:
        for place, tensor in tensors_in(name, output):
            self._evaluation.activation(self._log, "activation", place, tensor)
            for each in self._comparisons:
                each.activation(self._log, place, tensor)

    def _ask_gradients(self, at: int, scale: Any) -> None:
        if self._metrics.any("gradient"):
            held = [
                (self._parameter_index.names[one], self._parameter_index.parameters[one].grad)
                for one in self._parameter_index.of(at)
            ]
            present = ((name, (_unscaled(gradient, scale),)) for name, gradient in held if gradient is not None)
            self._evaluation.parameters(self._log, "gradient", present)

    def _ask_parameters(self) -> None:
        if not self._given:
            return
        named: list[tuple[str, nn.Parameter]] = list(
            zip(self._parameter_index.names, self._parameter_index.parameters, strict=True)
        )
        if self._metrics.any("parameter"):
            self._evaluation.parameters(self._log, "parameter", ((name, (one,)) for name, one in named))
        for each in self._comparisons:
            each.parameters(self._log, named)

    def _at_first(self) -> dict[str, Tensor]:
        return {name: weights for each in self._comparisons for name, weights in each.at_first.items()}

    def _check_whole(self) -> None:
        kinds = ("parameter", "parameter_difference", "gradient")
        for name, parameter in zip(self._parameter_index.names, self._parameter_index.parameters, strict=True):
            if is_sharded(parameter) and any(self._metrics.asked(kind, name) != NOTHING for kind in kinds):
                raise ValueError(
                    f"metrics: {name} is sharded, and watch measures in the first process only, where the other shards "
                    "are not; use forewarn.ModuleMonitor, which reduces the values of all of them"
                )


def _check(metric: Any) -> None:
    if not isinstance(metric, ModuleMetric) or not metric.kind:
        raise TypeError(f"metrics takes forewarn.ActivationMetric, GradientMetric and their like, not {metric!r}")
    if isinstance(metric, ActivationDifferenceMetric) and metric.reference is None:
        raise ValueError(
            f"metrics: {metric.name!r} needs a model to compare with, such as "
            f"forewarn.ActivationDifferenceMetric({metric.name!r}, ..., reference=copy.deepcopy(model).eval())"
        )
    if not is_metric_name(series_name(metric)):
        raise ValueError(f"metrics: {metric.name!r} can not be the name of a series; use letters, digits and _")


def series_name(metric: ModuleMetric) -> str:
    """The name under which a metric is recorded; a suffix of its aggregation comes after it."""
    return f"{metric.kind}_metric/{metric.name}"


def _length(metric: ModuleMetric) -> int:
    return len(metric.name)


def _by_reference(metrics: Sequence[ModuleMetric]) -> list[tuple[nn.Module | None, list[ModuleMetric]]]:
    """The difference metrics, those of one reference together."""
    found: dict[int, tuple[nn.Module | None, list[ModuleMetric]]] = {}
    for each in metrics:
        if isinstance(each, ActivationDifferenceMetric | ParameterDifferenceMetric):
            found.setdefault(id(each.reference), (each.reference, []))[1].append(each)
    return list(found.values())


def _unscaled(gradient: Tensor, scale: Any) -> Tensor:
    """A gradient as the optimizer will use it: fused ones divide by the loss scale as they step."""
    return gradient / scale if isinstance(scale, Tensor) else gradient


def _tensor(weights: NDArray[np.float32] | Tensor) -> Tensor:
    return weights if isinstance(weights, Tensor) else torch.from_numpy(np.array(weights))
