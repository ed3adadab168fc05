"""The user's own metrics in a watched run: the same metrics that a `ModuleMonitor` computes."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer

from forewarn.measure.forward import hookable_modules
from forewarn.measure.metric_evaluation import Evaluation, is_sharded, local
from forewarn.measure.metric_kinds import (
    NOTHING,
    ActivationDifferenceMetric,
    Metrics,
    ModuleMetric,
)
from forewarn.measure.module_outputs import (
    ROOT,
    NamedModules,
    default_format_module_name_fn,
    passing_on,
    tensors_in,
)
from forewarn.measure.parameters import ParameterIndex
from forewarn.measure.probe import Array, ModuleTap, Pending, Probe, Reading
from forewarn.measure.probes.stepping import Stepping
from forewarn.measure.references import Reference
from forewarn.measure.shards import Shard
from forewarn.measure.step import Step
from forewarn.measure.step_log import Settled
from forewarn.types import is_metric_name

_SEPARATOR = "\n"
"""Separates the parts of a key; never part of a module's or metric's name."""


class MetricsProbe(Probe):
    """`{kind}_metric/{name}` per module or parameter, for each metric that `watch(metrics=[…])` was given.

    Activations come from measured forward passes in training mode. Gradients are those that the optimizer uses, and
    parameters are read after the step. Differences are from the metric's own reference. Ranks are combined as in a
    `ModuleMonitor`.
    """

    name = "metrics"
    on_every_rank = True
    only_measured = True

    def __init__(self, parameter_index: ParameterIndex, metrics: Sequence[ModuleMetric]) -> None:
        self._parameter_index = parameter_index
        self._given = tuple(metrics)
        self._metrics = Metrics(_SEPARATOR)
        for metric in metrics:
            _check(metric)
            self._metrics.add(metric)
        self._check_shards()
        self.needs = {Stepping: [series_name(metric) for metric in metrics if metric.kind == "gradient"]}
        self.from_modules = [series_name(metric) for metric in metrics if metric.kind.startswith("activation")]
        self._evaluation = Evaluation(self._metrics, logging.getLogger("forewarn"))
        models = [metric.compared_with for metric in metrics if metric.compared_with is not None]
        declared = {id(model): model for model in models}
        self._evaluation.shards = self._shards()
        self._references = [Reference(NamedModules(model), self._evaluation, model) for model in declared.values()]
        for reference in self._references:
            self._check_reference(reference)
        self._at_first = {name: parameter.detach().clone() for name, parameter in self._compared(None)}
        """The initial weights, where a metric compares with them."""

    def module_taps(self) -> Sequence[ModuleTap]:
        running = [reference for reference in self._references if reference.is_compared]
        if not running and not self._metrics.any("activation"):
            return ()
        reachable = hookable_modules(self._parameter_index.called)
        outputs = [passing_on(name, module, self._returned) for name, module in reachable.items() if name]
        return [*(ModuleTap(self._parameter_index.called, entered=reference.run) for reference in running), *outputs]

    def forward_ended(self, output: Any) -> None:
        self._returned(ROOT, output)
        self._evaluation.forget()
        for reference in self._references:
            reference.stop_listening()

    def before_update(self, index: int, optimizer: Optimizer, step: Step, closure: bool) -> None:
        if step.measured and not closure:
            self._ask_gradients(index, getattr(optimizer, "grad_scale", None))

    def after_update(self, index: int, optimizer: Optimizer, step: Step, closure: bool) -> None:
        if step.measured and closure:
            self._ask_gradients(index, None)

    def collect(self, step: Step) -> Pending | None:
        if step.measured:
            self._ask_parameters()
        if not self._evaluation.log:
            return None
        tensors, unpack = self._evaluation.take_log().pack()

        def settle(arrays: Sequence[Array]) -> Pending:
            to_exchange, parts, combined = unpack(arrays).exchanged()
            return Pending(to_exchange, lambda arrays: self._readings(step, combined(arrays)), parts)

        return Pending(tensors, lambda arrays: self._readings(step, unpack(arrays)), settle=settle)

    def _readings(self, step: Step, settled: Settled) -> Iterator[Reading]:
        stepping = step.get(Stepping)
        by_series: dict[str, dict[str, float]] = {}
        for key, value in self._evaluation.averages(settled).items():
            kind, scope, metric = key.split(_SEPARATOR, 2)
            if kind != "gradient" or (stepping is not None and not stepping.skipped):
                by_series.setdefault(self._series(kind, metric), {})[scope] = value
        for name, values in by_series.items():
            yield Reading(name, tuple(values), list(values.values()))

    def state_dict(self) -> dict[str, Any]:
        at_first = ((name, local(weights)) for name, weights in self._at_first.items())
        return {"at_first": {name: weights.float().cpu().numpy() for name, weights in at_first}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, weights in state["at_first"].items():
            initial = self._at_first.get(name)
            if initial is not None and tuple(local(initial).shape) == tuple(weights.shape):
                local(initial).copy_(_tensor(weights))

    def _series(self, kind: str, answer: str) -> str:
        """The series of a metric, with the suffix that its aggregation added: `spread[max]` becomes `spread_max`."""
        metric = max(
            (candidate for candidate in self._given if candidate.kind == kind and answer.startswith(candidate.name)),
            key=lambda candidate: len(candidate.name),
        )
        suffix = re.sub(r"[^A-Za-z0-9.]+", "_", answer[len(metric.name) :]).strip("_.")
        return f"{series_name(metric)}_{suffix}" if suffix else series_name(metric)

    def _returned(self, name: str, output: Any) -> None:
        for place, tensor in tensors_in(name, output):
            self._evaluation.activation("activation", place, tensor)
            for reference in self._references:
                reference.compare(place, tensor)

    def _ask_gradients(self, index: int, scale: Any) -> None:
        if self._metrics.any("gradient"):
            shards, names = self._shards(), self._parameter_index.names
            gradients = [
                (names[position], _gradient(self._parameter_index.parameters[position], shards.get(names[position])))
                for position in self._parameter_index.of(index)
            ]
            filled = ((name, (_unscaled(gradient, scale),)) for name, gradient in gradients if gradient is not None)
            self._evaluation.shards = shards
            self._evaluation.parameters("gradient", filled)

    def _ask_parameters(self) -> None:
        if not self._given:
            return
        named = self._parameters()
        self._evaluation.shards = self._shards()
        self._evaluation.parameters("parameter", ((name, (parameter,)) for name, parameter in named))
        self._ask_differences(named, self._at_first, None)
        for reference in self._references:
            self._ask_differences(named, dict(reference.modules.parameters()), reference.declared)

    def _ask_differences(
        self, named: Iterable[tuple[str, nn.Parameter]], others: Mapping[str, Tensor], reference: nn.Module | None
    ) -> None:
        """Evaluate how parameters differ from others of the same name, except where the shape has changed."""
        pairs = (
            (name, (parameter, others[name]))
            for name, parameter in named
            if name in others and others[name].shape in (parameter.shape, self._whole_shape(name, parameter))
        )
        self._evaluation.parameters("parameter_difference", pairs, reference=reference)

    def _whole_shape(self, name: str, parameter: nn.Parameter) -> torch.Size:
        """The shape of the whole parameter, of which FSDP1 shows a flat piece."""
        shard = self._evaluation.shards.get(name)
        return parameter.shape if shard is None else torch.Size(shard.shape)

    def _shards(self) -> dict[str, Shard]:
        shards = self._parameter_index.shards
        return {} if shards is None else dict(zip(self._parameter_index.names, shards.of, strict=True))

    def _parameters(self) -> list[tuple[str, nn.Parameter]]:
        return list(zip(self._parameter_index.names, self._parameter_index.parameters, strict=True))

    def _compared(self, reference: nn.Module | None) -> list[tuple[str, nn.Parameter]]:
        """The parameters that a difference metric compares with this reference."""
        ask = partial(self._metrics.asked, "parameter_difference", reference=reference)
        return [(name, parameter) for name, parameter in self._parameters() if ask(name) is not NOTHING]

    def _check_reference(self, reference: Reference) -> None:
        """Raise if the reference cannot be compared with the model."""
        others = dict(reference.modules.parameters())
        addresses = {parameter.data_ptr() for parameter in self._parameter_index.parameters}
        addresses -= {0}  # empty tensors and shards have no address
        for name, parameter in others.items():
            if parameter.data_ptr() in addresses:
                raise ValueError(
                    f"metrics: the reference shares {name} with the watched model; use copy.deepcopy(model)"
                )
            if is_sharded(parameter):
                raise ValueError(f"metrics: {name} of the reference is sharded; copy the model before it is sharded")
        for name, parameter in self._compared(reference.declared):
            shape = self._whole_shape(name, parameter)
            if name not in others or others[name].shape != shape:
                raise ValueError(f"metrics: the reference has no {name} of shape {tuple(shape)} to compare with")
        if reference.is_compared:
            names = (default_format_module_name_fn(name) for name, _ in self._parameter_index.model.named_modules())
            reference.modules.check_twin(names, "metrics: the reference must have the structure of the watched model")
            if any(module.training for module in reference.modules.root.modules()):
                raise ValueError(
                    "metrics: the reference is in training mode, where dropout is active and its running statistics "
                    "change; call reference.eval() first"
                )

    def _check_shards(self) -> None:
        """Raise if a metric reads a sharded parameter, and how the values of its shards are combined is unknown."""
        kinds = ("parameter", "parameter_difference", "gradient")
        shards = self._shards()
        of_parameters = [metric for metric in self._given if metric.kind in kinds]
        for name, parameter in self._parameters():
            sharded = shards[name].is_divided if name in shards else is_sharded(parameter)
            for metric in of_parameters if sharded else ():
                if not re.match(metric.regex, name):
                    continue
                if callable(metric.fn) and metric.reduce is None:
                    raise ValueError(
                        f"metrics: {name} is sharded, and {metric.name!r} does not say how to combine the values of "
                        "its shards; add reduce='l2', 'mean', 'sum' or 'max', or use a built-in metric"
                    )


def _check(metric: Any) -> None:
    if not isinstance(metric, ModuleMetric) or not metric.kind:
        raise TypeError(f"metrics takes forewarn.ActivationMetric, GradientMetric and similar, not {metric!r}")
    if isinstance(metric, ActivationDifferenceMetric) and metric.reference is None:
        raise ValueError(
            f"metrics: {metric.name!r} needs a model to compare with, such as "
            f"forewarn.ActivationDifferenceMetric({metric.name!r}, ..., reference=copy.deepcopy(model).eval())"
        )
    if not is_metric_name(series_name(metric)):
        raise ValueError(f"metrics: {metric.name!r} cannot be the name of a series; use letters, digits and _")


def series_name(metric: ModuleMetric) -> str:
    """The name that a metric is recorded under, without any suffix from its aggregation."""
    return f"{metric.kind}_metric/{metric.name}"


def _gradient(parameter: nn.Parameter, shard: Shard | None) -> Tensor | None:
    """The gradient of a parameter; FSDP1 gives none to an empty shard, which is not to be taken for a missing one."""
    if parameter.grad is None and shard is not None and shard.is_divided and 0 in shard.local_shape:
        return parameter.detach()
    return parameter.grad


def _unscaled(gradient: Tensor, scale: Any) -> Tensor:
    """A gradient as the optimizer uses it: fused optimizers divide by the loss scale when they step."""
    return gradient / scale if isinstance(scale, Tensor) else gradient


def _tensor(weights: NDArray[np.float32] | Tensor) -> Tensor:
    return weights if isinstance(weights, Tensor) else torch.from_numpy(np.array(weights))
