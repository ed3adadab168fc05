"""`torch_module_monitor.monitor`: the monitor, with that package's keywords for metrics."""

from __future__ import annotations

from typing import Any

from forewarn.measure.module_outputs import default_format_module_name_fn
from forewarn.standalone.module_monitor import ModuleMonitor as _ModuleMonitor
from forewarn.standalone.monitor_mixin import MonitorMixin

__all__ = ["ModuleMonitor", "MonitorMixin", "default_format_module_name_fn"]


class ModuleMonitor(_ModuleMonitor):
    """`forewarn.ModuleMonitor` with `metric_name` and `metric_fn` instead of `name` and `fn`."""

    def add_activation_metric(  # type: ignore[override]
        self, metric_name: str, metric_fn: Any = None, *args: Any, **options: Any
    ) -> None:
        super().add_activation_metric(metric_name, metric_fn, *args, **options)

    def add_activation_difference_metric(  # type: ignore[override]
        self, metric_name: str, metric_fn: Any = None, *args: Any, **options: Any
    ) -> None:
        super().add_activation_difference_metric(metric_name, metric_fn, *args, **options)

    def add_parameter_metric(  # type: ignore[override]
        self, metric_name: str, metric_fn: Any = None, *args: Any, **options: Any
    ) -> None:
        super().add_parameter_metric(metric_name, metric_fn, *args, **options)

    def add_parameter_difference_metric(  # type: ignore[override]
        self, metric_name: str, metric_fn: Any = None, *args: Any, **options: Any
    ) -> None:
        super().add_parameter_difference_metric(metric_name, metric_fn, *args, **options)

    def add_gradient_metric(  # type: ignore[override]
        self, metric_name: str, metric_fn: Any = None, *args: Any, **options: Any
    ) -> None:
        super().add_gradient_metric(metric_name, metric_fn, *args, **options)
