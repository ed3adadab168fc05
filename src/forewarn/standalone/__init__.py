"""Monitors and functions that work without `forewarn.watch` and without a run directory."""

from forewarn.judge.gradient_tally import (
    GradientSummary,
    detect_exploding_gradients,
    detect_task_collapse,
    detect_vanishing_gradients,
)
from forewarn.measure.metric_kinds import (
    ActivationDifferenceMetric,
    ActivationMetric,
    GradientMetric,
    ParameterDifferenceMetric,
    ParameterMetric,
)
from forewarn.standalone.attention_logging import monitor_scaled_dot_product_attention
from forewarn.standalone.coordinate_check import RefinedCoordinateCheck
from forewarn.standalone.gradient_monitor import (
    GradientMonitor,
    compute_gradient_statistics,
    compute_layer_gradient_norms,
    compute_task_gradient_ratio,
)
from forewarn.standalone.metric_storage import StorageManager
from forewarn.standalone.module_monitor import ModuleMonitor
from forewarn.standalone.monitor_mixin import MonitorMixin
from forewarn.standalone.weight_update_monitor import WeightUpdateMonitor

__all__ = [
    "ActivationDifferenceMetric", "ActivationMetric", "GradientMetric", "GradientMonitor", "GradientSummary",
    "ModuleMonitor", "MonitorMixin", "ParameterDifferenceMetric", "ParameterMetric", "RefinedCoordinateCheck",
    "StorageManager", "WeightUpdateMonitor", "compute_gradient_statistics", "compute_layer_gradient_norms",
    "compute_task_gradient_ratio", "detect_exploding_gradients", "detect_task_collapse", "detect_vanishing_gradients",
    "monitor_scaled_dot_product_attention",
]  # fmt: skip
