"""`ModuleMonitor`: metrics of your own on every activation, parameter and gradient of a model."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from numbers import Real
from typing import Any, Self

from torch import Tensor, nn

from forewarn.measure.metric_evaluation import Evaluation
from forewarn.measure.metric_kinds import (
    NOTHING,
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
from forewarn.measure.module_outputs import Modules, default_format_module_name_fn, tensors_in
from forewarn.measure.probes.loss import TAKE_A_PART
from forewarn.measure.ranks import Ranks
from forewarn.measure.references import References
from forewarn.measure.step_log import Settled, StepLog
from forewarn.standalone.module_monitor.storage import StorageManager
from forewarn.standalone.module_monitor.subjects import Subjects

Function = Callable[..., Tensor | float] | str | None
"""What a metric computes, or the name of a built-in one; None for the built-in one of the metric's own name."""


class ModuleMonitor:
    """Logs metrics of your own for one model, compared with a reference if you like, on the steps that you choose.

    Results stay on their device until `end_step()` and reach the host in one transfer. There are hooks on the modules
    during a monitored step; during other steps there are none.

    For code that logs through a monitor from elsewhere (attention, coordinate check):

    - `is_monitoring(is_reference)`: whether what is logged now counts. A reference's activations count on the whole of
      a monitored step, also within `no_monitor()`.
    - `name_of(module)`: the name that a module of the model or of the reference is logged under, and whether it is the
      reference's; `excluded(name)` tells whether that name is not to be monitored.
    - `monitor_activations(name, tensor, is_reference)`: all activation metrics of a tensor. With `is_reference` a clone
      is kept, if a difference metric asks for that name, until the next forward of the reference or the end of the
      micro-batch.
    - `log_tensor(key, tensor)`: keeps only the sum of the elements, on the device. It does nothing while a forward of
      the reference is under way.
    - `ignoring_reference()`: forwards of the reference within it are not taken for reference activations.
    - `module`, `reference_module`: as they were given; `modules.heard` and `references.modules.heard`: (name, module)
      of all that is not excluded.
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
        self._subjects = Subjects(self, re.compile(excluded_modules_regex))
        self._metrics = Metrics()
        self._evaluation = Evaluation(self._metrics, self.logger, strict)
        self._log = StepLog()
        self._open = False
        """Whether the step under way is a monitored one."""
        self._paused = 0
        """How many `no_monitor()` are open."""
        self._heard = False
        """Whether an activation of the module was seen in this step."""
        self._silence_told = False

    # Metrics

    def add_activation_metric(
        self, name: str, fn: Function = None, metric_regex: str = ".*", metric_aggregation_fn: Aggregate | None = None
    ) -> None:
        """`fn(activation)` of every module's output, as `activation/{module}/{name}`."""
        self.add(ActivationMetric(name, fn, metric_regex, metric_aggregation_fn))

    def add_activation_difference_metric(
        self, name: str, fn: Function = None, metric_regex: str = ".*", metric_aggregation_fn: Aggregate | None = None
    ) -> None:
        """`fn(activation, reference)`, as `activation_difference/{module}/{name}`."""
        self.add(ActivationDifferenceMetric(name, fn, metric_regex, metric_aggregation_fn))

    def add_parameter_metric(
        self, name: str, fn: Function = None, metric_regex: str = ".*", reduce: Reduce | None = None
    ) -> None:
        """`fn(parameter)`, as `parameter/{parameter}/{name}`; `reduce` tells how values of FSDP2 shards make one."""
        self.add(ParameterMetric(name, fn, metric_regex, reduce=reduce))

    def add_parameter_difference_metric(
        self, name: str, fn: Function = None, metric_regex: str = ".*", reduce: Reduce | None = None
    ) -> None:
        """`fn(parameter, reference)`, as `parameter_difference/{parameter}/{name}`."""
        self.add(ParameterDifferenceMetric(name, fn, metric_regex, reduce=reduce))

    def add_gradient_metric(
        self, name: str, fn: Function = None, metric_regex: str = ".*", reduce: Reduce | None = None
    ) -> None:
        """`fn(gradient)`, as `gradient/{parameter}/{name}`."""
        self.add(GradientMetric(name, fn, metric_regex, reduce=reduce))

    def add(self, metric: ModuleMetric) -> None:
        """Add a metric of any kind; a name that its kind has already is an error."""
        if metric.healthy is not None:
            raise ValueError(f"metric {metric.name!r}: healthy= is judged in a watched run; use watch(metrics=[...])")
        if getattr(metric, "reference", None) is not None:
            raise ValueError(f"metric {metric.name!r}: reference= is for watch; call set_reference_module here")
        self._metrics.add(metric)

    # Models

    @property
    def module(self) -> nn.Module | None:
        return None if self.modules is None else self.modules.model

    @property
    def reference_module(self) -> nn.Module | None:
        return None if self.references is None else self.references.modules.model

    @property
    def modules(self) -> Modules | None:
        return self._subjects.modules

    @property
    def references(self) -> References | None:
        return self._subjects.references

    def set_module(self, module: nn.Module) -> None:
        """The model to monitor; only once, until `close()`."""
        self._subjects.set_module(module)
        self._subjects.listen(self._open)

    def set_reference_module(self, module: nn.Module | None) -> None:
        """The model to compare with, of the same structure; it takes the place of an earlier one, None only removes it.

        On a monitored step, run it on the same input before the monitored model, within `no_monitor()` or not.
        """
        self._subjects.set_reference(module)
        self._subjects.listen(self._open)

    def has_reference_module(self) -> bool:
        return self.references is not None

    def remove_reference_module(self) -> None:
        """Take the reference's hooks back and release what was kept of it."""
        self._subjects.remove_reference()

    def close(self) -> None:
        """Take every hook back and release the models; what was logged stays readable. May be called twice."""
        self._subjects.close()
        self._open = False
        self._log = StepLog()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # Steps

    def is_step_monitored(self, step: int) -> bool:
        return bool(self.monitor_step_fn(step))

    def is_monitoring(self, is_reference: bool = False) -> bool:
        """Whether what is logged now counts; of a reference also within `no_monitor()`."""
        return self._open and (is_reference or not self._paused)

    def begin_step(self, step: int) -> bool:
        """Call before the first forward of a step; tells whether the step is monitored."""
        if self.current_step is not None and step < self.current_step:
            raise ValueError(f"step {step} is below the current step {self.current_step}; steps only go up")
        monitored = self.is_step_monitored(step)
        if monitored and self.modules is None:
            raise ValueError("there is no module to monitor; call set_module before begin_step")
        self._forget()
        self._log = StepLog()
        self.current_step = step
        self._open = monitored
        self._heard = False
        if monitored:
            self.storage.create_step_entry(step)
        self._subjects.listen(self._open)
        return monitored

    def after_micro_batch(self) -> None:
        """Call after each of several micro-batches: releases the reference's activations."""
        self._forget()

    def end_step(self) -> None:
        """Call when all of a step has been logged: brings its metrics to the host, in one transfer."""
        self._forget()
        if self._open and self.module is not None:
            self._tell_silence()
            self._record(Ranks.of(self.module).reduced(self._log.settle(), self.logger))
        self._log = StepLog()
        self._open = False
        if self.current_step is not None:  # where every step is monitored, the hooks stay from one to the next
            self._subjects.listen(self.is_step_monitored(self.current_step + 1))

    @contextmanager
    def no_monitor(self) -> Iterator[None]:
        """Nothing within is monitored, such as a validation; a reference's forward still counts as its forward."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    @contextmanager
    def ignoring_reference(self) -> Iterator[None]:
        """Forwards of the reference within do not count as its forward."""
        references = self.references
        if references is None:
            yield
            return
        references.ignored += 1
        try:
            yield
        finally:
            references.ignored -= 1

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
        """One number, such as the loss; several of one key are averaged, or given to `aggregation_fn` as a list.

        With `force` it is logged on any step, and at once if the step is not monitored.
        """
        value = _number(key, value)
        if self._within_reference() or not (force or self.is_monitoring()):
            return
        if aggregation_fn is None:
            self._log.number(key, value)
        else:
            self._log.scalar(key, value, aggregation_fn)
        if not self._open:
            self._record(self._log.settle())

    def log_scalars(self, monitor_dict: Mapping[str, Tensor | float], force: bool = False) -> None:
        """Several numbers at once."""
        for key, value in monitor_dict.items():
            self.log_scalar(key, value, force=force)

    def log_tensor(self, key: str, tensor: Tensor, aggregation_fn: Aggregate | None = None) -> None:
        """The elements of a tensor: their mean over all micro-batches, or what `aggregation_fn` makes of them."""
        if self.is_monitoring() and not self._within_reference():
            kept = tensor.detach().clone() if aggregation_fn is not None or tensor.dim() == 0 else tensor
            self._log.tensor(key, kept, aggregation_fn)

    # Measuring

    def monitor_activations(self, module: str | nn.Module, activations: Any, is_reference: bool = False) -> None:
        """All activation metrics of a tensor, or of each tensor in a tuple, mapping or dataclass.

        Hooks call this for the output of every module; call it for a tensor that is no module's output.
        """
        name, is_reference = self.name_of(module, is_reference)
        if not self.excluded(name):
            self.heard(name, activations, is_reference)

    def heard(self, name: str, activations: Any, is_reference: bool = False) -> None:
        """What a module that is not excluded has returned."""
        if not self.is_monitoring(is_reference):
            return
        for place, tensor in tensors_in(name, activations):
            if is_reference:
                self._keep(place, tensor)
                continue
            self._heard = True
            self._evaluation.activation(self._log, "activation", place, tensor)
            if self.references is not None and self._metrics.asked("activation_difference", place) != NOTHING:
                self._compare(place, tensor, self.references)

    def forward_ended(self) -> None:
        """The monitored model has made a forward."""
        self._evaluation.forget()

    def monitor_parameters(self) -> None:
        """All parameter metrics, and with a reference all parameter difference metrics, as the parameters are now."""
        if not self.is_monitoring() or self.modules is None:
            return
        ask = self._evaluation.parameters
        ask(self._log, "parameter", ((name, (one,)) for name, one in self.modules.parameters()))
        if self.references is not None:
            known = dict(self.references.modules.parameters())
            pairs = ((name, (one, known[name])) for name, one in self.modules.parameters() if name in known)
            ask(self._log, "parameter_difference", pairs)

    def monitor_gradients(self, before_clip: bool = False) -> None:
        """All gradient metrics, as the gradients are now; under `gradient_before_clip/…` with `before_clip`."""
        if not self.is_monitoring() or self.modules is None:
            return
        gradients = ((name, (one.grad,)) for name, one in self.modules.parameters() if one.grad is not None)
        self._evaluation.parameters(self._log, "gradient", gradients, "gradient_before_clip" if before_clip else "")

    # Names

    def excluded(self, name: str) -> bool:
        """Whether the activations of the module of this name are not monitored."""
        return self._subjects.excluded(name)

    def name_of(self, module: str | nn.Module, is_reference: bool = False) -> tuple[str, bool]:
        """The name that a module is logged under, and whether it is the reference's; a name stays what it is."""
        return (module, is_reference) if isinstance(module, str) else self._subjects.name_of(module, is_reference)

    # Inside

    def _keep(self, name: str, tensor: Tensor) -> None:
        if self.references is not None and self._metrics.asked("activation_difference", name) != NOTHING:
            self.references.keep(name, tensor)

    def _compare(self, name: str, tensor: Tensor, references: References) -> None:
        reference = references.of(name, tensor.device)
        if reference is not None:
            self._evaluation.activation(self._log, "activation_difference", name, tensor, reference)
        else:
            self.logger.warning(
                "step %s: no reference activation for %s; run the reference before the monitored module",
                self.current_step,
                name,
            )

    def _within_reference(self) -> bool:
        return self.references is not None and self.references.running > 0

    def _forget(self) -> None:
        self._evaluation.forget()
        if self.references is not None:
            self.references.forget()

    def _tell_silence(self) -> None:
        """Hooks never fire inside compiled code: say so rather than log nothing."""
        if not self._heard and not self._silence_told and self._metrics.any("activation", "activation_difference"):
            self._silence_told = True
            self.logger.warning(
                "step %s: no forward of the monitored module was seen, so there are no activations. Modules inside "
                "torch.compile can not be seen: on monitored steps call the model that was not compiled",
                self.current_step,
            )

    def _record(self, settled: Settled) -> None:
        for key, error in settled.failures.items():
            self._evaluation.failed(key, error)
        self.storage.record(self.current_step or 0, settled.averages())


def _number(key: str, value: Any) -> Tensor | float:
    """A value as one number that nobody changes any more."""
    if isinstance(value, Tensor) and value.is_complex():
        raise ValueError(f"log_scalar takes a real number for {key!r}, not a tensor of {value.dtype}; {TAKE_A_PART}")
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.detach().clone()
    if isinstance(value, Real):
        return float(value)
    what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
    raise ValueError(f"log_scalar takes one number for {key!r}, not {what}")
