"""`ModuleMonitor`: your own metrics on every activation, parameter and gradient of a model."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from numbers import Real
from typing import Any, Self

from torch import Tensor, nn

from forewarn.measure.hidden_from_checkpointing import hidden_from_checkpointing
from forewarn.measure.metric_evaluation import Evaluation
from forewarn.measure.metric_kinds import (
    ActivationDifferenceMetric,
    ActivationMetric,
    Aggregate,
    GradientMetric,
    Metrics,
    ModuleMetric,
    ParameterDifferenceMetric,
    ParameterMetric,
    Reduce,
)
from forewarn.measure.module_outputs import NamedModules, default_format_module_name_fn, tensors_in
from forewarn.measure.probes.loss import TAKE_A_PART
from forewarn.measure.ranks import Ranks
from forewarn.measure.references import Reference
from forewarn.measure.step_log import Settled
from forewarn.standalone.metric_storage import StorageManager
from forewarn.standalone.monitor_mixin import introduce

Function = Callable[..., Tensor | float] | str | None
"""A function that computes a metric, or the name of a built-in one; None for the built-in one of the same name."""


class ModuleMonitor:
    """Logs your own metrics of a model, optionally compared with a reference, on the steps you choose.

    Results stay on their device until `end_step()` and reach the host in one transfer. Modules have hooks only during
    monitored steps.

    Code that logs from elsewhere (attention, the coordinate check) uses `is_monitoring`, `name_of`, `excluded`,
    `monitor_activations`, `log_tensor` and `ignoring_reference`. `modules.heard` and `reference.modules.heard` list
    (name, module) for every module that is not excluded.
    """

    def __init__(
        self,
        monitor_step_fn: Callable[[int], bool] = lambda step: step % 20 == 0,
        format_module_name_fn: Callable[[str], str] = default_format_module_name_fn,
        excluded_modules_regex: str = r"$.^",
        logger: logging.Logger | None = None,
        cpu_offload: bool = False,
        strict: bool = False,
    ) -> None:
        """`cpu_offload` keeps reference activations in host memory; `strict` lets a failing metric end the training."""
        self.monitor_step_fn = monitor_step_fn
        self.format_module_name_fn = format_module_name_fn
        self.logger = logger or logging.getLogger("forewarn")
        self.cpu_offload = cpu_offload
        self.storage = StorageManager(self.logger)
        self.current_step: int | None = None
        self.modules: NamedModules | None = None
        self.reference: Reference | None = None
        self._excluded = re.compile(excluded_modules_regex)
        self._metrics = Metrics()
        self._evaluation = Evaluation(self._metrics, self.logger, strict)
        self._open = False
        """Whether the current step is monitored."""
        self._paused = 0
        """Number of `no_monitor()` blocks that are open."""
        self._heard = False
        """Whether an activation of the module was seen in this step."""
        self._silence_told = False
        self._strict = strict
        self._failures: set[str] = set()
        """Hook errors that have been logged."""

    # Metrics

    def add_activation_metric(
        self, name: str, fn: Function = None, metric_regex: str = ".*", metric_aggregation_fn: Aggregate | None = None
    ) -> None:
        """Log `fn(activation)` of every module's output as `activation/{module}/{name}`."""
        self.add(ActivationMetric(name, fn, metric_regex, metric_aggregation_fn))

    def add_activation_difference_metric(
        self, name: str, fn: Function = None, metric_regex: str = ".*", metric_aggregation_fn: Aggregate | None = None
    ) -> None:
        """Log `fn(activation, reference)` as `activation_difference/{module}/{name}`."""
        self.add(ActivationDifferenceMetric(name, fn, metric_regex, metric_aggregation_fn))

    def add_parameter_metric(
        self, name: str, fn: Function = None, metric_regex: str = ".*", reduce: Reduce | None = None
    ) -> None:
        """Log `fn(parameter)` as `parameter/{parameter}/{name}`; `reduce` says how to combine FSDP2 shards."""
        self.add(ParameterMetric(name, fn, metric_regex, reduce=reduce))

    def add_parameter_difference_metric(
        self, name: str, fn: Function = None, metric_regex: str = ".*", reduce: Reduce | None = None
    ) -> None:
        """Log `fn(parameter, reference)` as `parameter_difference/{parameter}/{name}`."""
        self.add(ParameterDifferenceMetric(name, fn, metric_regex, reduce=reduce))

    def add_gradient_metric(
        self, name: str, fn: Function = None, metric_regex: str = ".*", reduce: Reduce | None = None
    ) -> None:
        """Log `fn(gradient)` as `gradient/{parameter}/{name}`."""
        self.add(GradientMetric(name, fn, metric_regex, reduce=reduce))

    def add(self, metric: ModuleMetric) -> None:
        """Add a metric of any kind; its name must be new within its kind."""
        if metric.healthy is not None:
            raise ValueError(f"metric {metric.name!r}: healthy= is judged in a watched run; use watch(metrics=[...])")
        if metric.compared_with is not None:
            raise ValueError(f"metric {metric.name!r}: reference= is for watch; call set_reference_module here")
        self._metrics.add(metric)

    # Models

    @property
    def module(self) -> nn.Module | None:
        return None if self.modules is None else self.modules.model

    @property
    def reference_module(self) -> nn.Module | None:
        return None if self.reference is None else self.reference.modules.model

    def set_module(self, module: nn.Module) -> None:
        """Set the model to monitor; only once, until `close()`."""
        if not isinstance(module, nn.Module):
            raise ValueError(f"Module cannot be {module!r}: set_module takes a torch.nn.Module")
        if self.modules is not None:
            raise ValueError("Module has already been set! Call close() before setting another")
        self.modules = NamedModules(module, self.format_module_name_fn, self.excluded, self.hook_failed)
        introduce(self.modules, self)
        self._listen(self._open)

    def set_reference_module(self, module: nn.Module | None) -> None:
        """Set the model to compare with, of the same structure. It replaces an earlier one; None only removes that.

        On a monitored step, run it on the same input before the monitored model, within `no_monitor()` or not.
        """
        if self.modules is None:
            raise ValueError("Please set the monitored module before setting the reference module: call set_module")
        self.remove_reference_module()
        if module is None:
            return
        modules = NamedModules(module, self.format_module_name_fn, self.excluded, self.hook_failed)
        rule = "The reference module must have the same structure as the monitored module"
        modules.check_twin(self.modules.names.values(), rule)
        self.reference = Reference(
            modules, self._evaluation, cpu_offload=self.cpu_offload, missing=self._tell_missing_reference
        )
        introduce(modules, self, is_reference=True)
        self._listen(self._open)

    def has_reference_module(self) -> bool:
        return self.reference is not None

    def remove_reference_module(self) -> None:
        """Remove the reference's hooks and release its activations."""
        if self.reference is not None:
            introduce(self.reference.modules, None)
            self.reference.close()
            self.reference = None

    def close(self) -> None:
        """Remove all hooks and release the models; logged metrics stay readable. Safe to call twice."""
        self.remove_reference_module()
        if self.modules is not None:
            introduce(self.modules, None)
            self.modules.stop_listening()
            self.modules = None
        self._open = False
        self._evaluation.take_log()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # Steps

    def is_step_monitored(self, step: int) -> bool:
        return bool(self.monitor_step_fn(step))

    def is_monitoring(self, is_reference: bool = False) -> bool:
        """Whether values logged now count; for a reference, also within `no_monitor()`."""
        return self._open and (is_reference or not self._paused)

    def begin_step(self, step: int) -> bool:
        """Call before the first forward of a step; returns whether the step is monitored."""
        if self.current_step is not None and step < self.current_step:
            raise ValueError(f"Step {step} cannot be smaller than the current step {self.current_step}")
        monitored = self.is_step_monitored(step)
        if monitored and self.modules is None:
            raise ValueError("No module to monitor. Call set_module before begin_step")
        self.after_micro_batch()
        self._evaluation.take_log()
        self.current_step = step
        self._open = monitored
        self._heard = False
        if monitored:
            self.storage.create_step_entry(step)
        self._listen(self._open)
        return monitored

    def after_micro_batch(self) -> None:
        """Call after each of several micro-batches: releases the reference's activations."""
        self._evaluation.forget()
        if self.reference is not None:
            self.reference.forget()

    def end_step(self) -> None:
        """Call after everything in a step has been logged: brings its metrics to the host in one transfer."""
        self.after_micro_batch()
        log = self._evaluation.take_log()
        if self._open and self.module is not None:
            self._tell_silence()
            self._record(log.settle().over(Ranks.of(self.module), self.logger))
        self._open = False
        if self.current_step is not None:  # where every step is monitored, the hooks stay from one to the next
            self._listen(self.is_step_monitored(self.current_step + 1))

    @contextmanager
    def no_monitor(self) -> Iterator[None]:
        """Monitor nothing within this block, for example during validation; the reference's forwards still count."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    @contextmanager
    def ignoring_reference(self) -> Iterator[None]:
        """Ignore forwards of the reference within this block."""
        reference = self.reference
        if reference is None:
            yield
            return
        reference.ignored += 1
        try:
            yield
        finally:
            reference.ignored -= 1

    def get_step_metrics(self) -> dict[str, float]:
        """`{metric: value}` of the current step, complete after `end_step()`."""
        return self.storage.get_step_metrics(self.current_step)

    def get_all_metrics(self) -> dict[int, dict[str, float]]:
        """`{step: {metric: value}}`."""
        return self.storage.get_all_metrics()

    # Logging

    def log_scalar(
        self, key: str, value: Tensor | float, aggregation_fn: Aggregate | None = None, force: bool = False
    ) -> None:
        """Log one number, such as the loss; several under one key are averaged, or go to `aggregation_fn` as a list.

        With `force` it is logged on any step, and at once if the step is not monitored.
        """
        value = _number(key, value)
        if self._within_reference() or not (force or self.is_monitoring()):
            return
        if aggregation_fn is None:
            self._evaluation.log.number(key, value)
        else:
            self._evaluation.log.scalar(key, value, aggregation_fn)
        if not self._open:
            self._record(self._evaluation.log.settle())

    def log_scalars(self, monitor_dict: Mapping[str, Tensor | float], force: bool = False) -> None:
        """Log several numbers at once."""
        for key, value in monitor_dict.items():
            self.log_scalar(key, value, force=force)

    def log_tensor(self, key: str, tensor: Tensor, aggregation_fn: Aggregate | None = None) -> None:
        """Log the elements of a tensor: their mean over all micro-batches, or the result of `aggregation_fn`.

        Without such a function, only their sum is kept. Nothing is logged while the reference runs.
        """
        if self.is_monitoring() and not self._within_reference():
            with hidden_from_checkpointing():
                values = tensor.detach().clone() if aggregation_fn is not None or tensor.dim() == 0 else tensor
                self._evaluation.log.tensor(key, values, aggregation_fn)

    # Measuring

    def monitor_activations(self, module: str | nn.Module, activations: Any, is_reference: bool = False) -> None:
        """Evaluate all activation metrics on a tensor, or on each tensor in a tuple, mapping or dataclass.

        Call it for a tensor that is not a module's output: hooks see the others. For a reference, activations that a
        difference metric needs are kept until its next forward or the end of the micro-batch.
        """
        name, is_reference = self.name_of(module, is_reference)
        if not self.excluded(name):
            with hidden_from_checkpointing():
                self.heard(name, activations, is_reference)

    def heard(self, name: str, activations: Any, is_reference: bool = False) -> None:
        """Take the output of a module that is not excluded."""
        if not self.is_monitoring(is_reference):
            return
        if is_reference:
            if self.reference is not None:
                self.reference.keep(name, activations)
            return
        for place, tensor in tensors_in(name, activations):
            self._heard = True
            self._evaluation.activation("activation", place, tensor)
            if self.reference is not None:
                self.reference.compare(place, tensor)

    def monitor_parameters(self) -> None:
        """Evaluate all parameter metrics on the current parameters; with a reference, also the difference metrics."""
        if not self.is_monitoring() or self.modules is None:
            return
        named = self.modules.parameters()
        self._evaluation.parameters("parameter", ((name, (parameter,)) for name, parameter in named))
        if self.reference is not None:
            references = dict(self.reference.modules.parameters())
            pairs = ((name, (parameter, references[name])) for name, parameter in named if name in references)
            self._evaluation.parameters("parameter_difference", pairs)

    def monitor_gradients(self, before_clip: bool = False) -> None:
        """Evaluate all gradient metrics on the current gradients; `before_clip` logs under `gradient_before_clip/…`."""
        if self.is_monitoring() and self.modules is not None:
            gradients = ((name, (gradient,)) for name, gradient in self.modules.gradients())
            self._evaluation.parameters("gradient", gradients, "gradient_before_clip" if before_clip else "")

    # Names

    def excluded(self, name: str) -> bool:
        """Whether the module with this name is excluded: its activations are not monitored."""
        return self._excluded.match(name) is not None

    def name_of(self, module: str | nn.Module, is_reference: bool = False) -> tuple[str, bool]:
        """The name under which a module is logged, and whether it is the reference's; a string is returned as is."""
        if isinstance(module, str):
            return module, is_reference
        if self.modules is not None and not is_reference and module in self.modules.names:
            return self.modules.names[module], False
        if self.reference is not None and module in self.reference.modules.names:
            return self.reference.modules.names[module], True
        raise ValueError(f"this {type(module).__name__} is not part of the monitored module or its reference")

    # Inside

    def hook_failed(self, error: Exception) -> None:
        """The outer guard of every hook: training goes on without what it would have logged, unless `strict`."""
        if self._strict:
            raise error
        message = f"{type(error).__name__}: {error}"
        if message not in self._failures:
            self._failures.add(message)
            text = "step %s: a hook failed: %s; training goes on without what it would have logged"
            self.logger.warning(text, self.current_step, message)

    def _listen(self, is_listening: bool) -> None:
        """Hook the modules during a monitored step only."""
        for side in (self.modules, self.reference):
            if side is not None and not is_listening:
                side.stop_listening()
        if self.modules is not None and is_listening:
            self.modules.listen(self._forward_begins, self.heard, self._evaluation.forget)
        if self.reference is not None and is_listening:
            self.reference.listen(partial(self.heard, is_reference=True))

    def _forward_begins(self) -> None:
        if self.reference is not None:
            self.reference.restart()

    def _within_reference(self) -> bool:
        return self.reference is not None and self.reference.running > 0

    def _tell_missing_reference(self, name: str) -> None:
        text = "step %s: no reference activation for %s; run the reference before the monitored module"
        self.logger.warning(text, self.current_step, name)

    def _tell_silence(self) -> None:
        """Hooks never fire inside compiled code: say so rather than log nothing."""
        if not self._heard and not self._silence_told and self._metrics.any("activation", "activation_difference"):
            self._silence_told = True
            self.logger.warning(
                "step %s: no forward of the monitored module was seen, so there are no activations. Hooks cannot see "
                "modules inside torch.compile: on monitored steps call the model that was not compiled",
                self.current_step,
            )

    def _record(self, settled: Settled) -> None:
        self.storage.record(self.current_step or 0, self._evaluation.averages(settled))


def _number(key: str, value: Any) -> Tensor | float:
    """A value as one number that no longer changes."""
    if isinstance(value, Tensor) and value.is_complex():
        raise ValueError(f"log_scalar takes a real number for {key!r}, not a tensor of {value.dtype}; {TAKE_A_PART}")
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.detach().clone()
    if isinstance(value, Real):
        return float(value)
    description = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
    raise ValueError(f"log_scalar takes one number for {key!r}, not {description}")
