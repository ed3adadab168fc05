"""Metrics of your own on every activation, parameter and gradient of a model."""

from forewarn.probes.module_monitor.attention import monitor_scaled_dot_product_attention
from forewarn.probes.module_monitor.coordinate_check import RefinedCoordinateCheck
from forewarn.probes.module_monitor.metrics import (
    ActivationDifferenceMetric,
    ActivationMetric,
    GradientMetric,
    Metric,
    ParameterDifferenceMetric,
    ParameterMetric,
)
from forewarn.probes.module_monitor.mixin import MonitorMixin
from forewarn.probes.module_monitor.monitor import ModuleMonitor
from forewarn.probes.module_monitor.storage import StorageManager

__all__ = [
    "ActivationDifferenceMetric", "ActivationMetric", "GradientMetric", "Metric", "ModuleMonitor", "MonitorMixin",
    "ParameterDifferenceMetric", "ParameterMetric", "RefinedCoordinateCheck", "StorageManager",
    "monitor_scaled_dot_product_attention",
]  # fmt: skip
