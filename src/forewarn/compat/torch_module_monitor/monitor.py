"""`torch_module_monitor.monitor`: the monitor, with that package's keywords and attributes."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from forewarn.compat.torch_module_monitor.hooks import MonitorHooks
from forewarn.compat.torch_module_monitor.storage import StorageManager
from forewarn.measure.metric_kinds import Aggregate, Reduce
from forewarn.measure.module_outputs import NamedModules, default_format_module_name_fn
from forewarn.standalone.module_monitor import ModuleMonitor as _ModuleMonitor
from forewarn.standalone.monitor_mixin import MonitorMixin

__all__ = ["ModuleMonitor", "MonitorMixin", "default_format_module_name_fn"]


class ModuleMonitor(_ModuleMonitor):
    """`forewarn.ModuleMonitor` with `metric_name` and `metric_fn` instead of `name` and `fn`.

    The attributes of the public package show the monitor's state at the time they are read. Mappings are read-only.
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
        super().__init__(monitor_step_fn, format_module_name_fn, excluded_modules_regex, logger, cpu_offload, strict)
        self.storage: StorageManager = StorageManager(self.logger)

    def add_activation_metric(
        self,
        metric_name: str,
        metric_fn: Any = None,
        metric_regex: str = ".*",
        metric_aggregation_fn: Aggregate | None = None,
    ) -> None:
        super().add_activation_metric(metric_name, metric_fn, metric_regex, metric_aggregation_fn)

    def add_activation_difference_metric(
        self,
        metric_name: str,
        metric_fn: Any = None,
        metric_regex: str = ".*",
        metric_aggregation_fn: Aggregate | None = None,
    ) -> None:
        super().add_activation_difference_metric(metric_name, metric_fn, metric_regex, metric_aggregation_fn)

    def add_parameter_metric(
        self, metric_name: str, metric_fn: Any = None, metric_regex: str = ".*", reduce: Reduce | None = None
    ) -> None:
        super().add_parameter_metric(metric_name, metric_fn, metric_regex, reduce)

    def add_parameter_difference_metric(
        self, metric_name: str, metric_fn: Any = None, metric_regex: str = ".*", reduce: Reduce | None = None
    ) -> None:
        super().add_parameter_difference_metric(metric_name, metric_fn, metric_regex, reduce)

    def add_gradient_metric(
        self, metric_name: str, metric_fn: Any = None, metric_regex: str = ".*", reduce: Reduce | None = None
    ) -> None:
        super().add_gradient_metric(metric_name, metric_fn, metric_regex, reduce)

    @property
    def excluded_modules_compiled_re(self) -> re.Pattern[str]:
        return self._excluded

    @property
    def module_names(self) -> Mapping[nn.Module, str]:
        """The name of every module of the monitored model."""
        return MappingProxyType({} if self.modules is None else self.modules.names)

    @property
    def reference_module_names(self) -> Mapping[nn.Module, str]:
        return MappingProxyType({} if self.reference is None else self.reference.modules.names)

    @property
    def reference_module_activations(self) -> Mapping[str, Tensor]:
        """The reference's activations that a difference metric compares, until the end of the micro-batch."""
        kept = {} if self.reference is None else self.reference.kept
        return MappingProxyType({name: activations[-1] for name, activations in kept.items()})

    @property
    def ignore_reference_module_activations(self) -> bool:
        """Whether forwards of the reference count for nothing."""
        return self.reference is not None and self.reference.ignored > 0

    @ignore_reference_module_activations.setter
    def ignore_reference_module_activations(self, ignored: bool) -> None:
        if self.reference is not None:
            self.reference.ignored = int(ignored)

    @property
    def current_step_monitored(self) -> bool:
        return self._open

    @property
    def within_monitoring_window(self) -> bool:
        return self.is_monitoring()

    @property
    def activation_hooks(self) -> MonitorHooks:
        """The hooks on the model, which it has during a monitored step only."""
        return _hooks_on(self.modules)

    @property
    def reference_activation_hooks(self) -> MonitorHooks:
        return _hooks_on(None if self.reference is None else self.reference.modules)

    @property
    def activation_metrics(self) -> Mapping[str, tuple[re.Pattern[str], Any, Any]]:
        """The regular expression, the function and the aggregation function of each metric, by name."""
        return self._metrics_of("activation")

    @property
    def activation_difference_metrics(self) -> Mapping[str, tuple[re.Pattern[str], Any, Any]]:
        return self._metrics_of("activation_difference")

    @property
    def parameter_metrics(self) -> Mapping[str, tuple[re.Pattern[str], Any, Any]]:
        return self._metrics_of("parameter")

    @property
    def parameter_difference_metrics(self) -> Mapping[str, tuple[re.Pattern[str], Any, Any]]:
        return self._metrics_of("parameter_difference")

    @property
    def gradient_metrics(self) -> Mapping[str, tuple[re.Pattern[str], Any, Any]]:
        return self._metrics_of("gradient")

    def _metrics_of(self, kind: str) -> Mapping[str, tuple[re.Pattern[str], Any, Any]]:
        return MappingProxyType(
            {
                metric.name: (re.compile(metric.regex), metric.fn, metric.aggregate)
                for metric in self._metrics
                if metric.kind == kind
            }
        )


def _hooks_on(modules: NamedModules | None) -> MonitorHooks:
    return MonitorHooks() if modules is None else MonitorHooks(modules.hooks, (module for _, module in modules.heard))
