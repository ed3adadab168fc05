"""Metrics of your own on every activation, parameter and gradient of a model."""

from forewarn.measure.metric_kinds import (
    ActivationDifferenceMetric,
    ActivationMetric,
    GradientMetric,
    ModuleMetric,
    ParameterDifferenceMetric,
    ParameterMetric,
)
from forewarn.standalone.module_monitor.attention_logging import monitor_scaled_dot_product_attention
from forewarn.standalone.module_monitor.mixin import MonitorMixin
from forewarn.standalone.module_monitor.module_monitor import ModuleMonitor
from forewarn.standalone.module_monitor.refined_coordinate_check import RefinedCoordinateCheck
from forewarn.standalone.module_monitor.storage import StorageManager

__all__ = [
    "ActivationDifferenceMetric", "ActivationMetric", "GradientMetric", "ModuleMetric", "ModuleMonitor", "MonitorMixin",
    "ParameterDifferenceMetric", "ParameterMetric", "RefinedCoordinateCheck", "StorageManager",
    "monitor_scaled_dot_product_attention",
]  # fmt: skip
