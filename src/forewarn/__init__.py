"""forewarn tells you what is going wrong in a training run before it is lost, why, and what to do about it.

Public names are resolved when they are first used: `import forewarn` imports neither torch nor numpy.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from forewarn.random_states import keep_on_import

__version__ = "0.1.0"

keep_on_import()

if TYPE_CHECKING:
    from forewarn.attach import watch
    from forewarn.catalogue import Cadence, Metric, Reduce, Scope
    from forewarn.config import Config, Snapshots
    from forewarn.judge.forecast import Forecast
    from forewarn.judge.headlines import Message
    from forewarn.judge.registry import Rule, finding, rule
    from forewarn.judge.remedies import advise
    from forewarn.judge.rules.anomaly import anomaly
    from forewarn.judge.series import Panel, Series
    from forewarn.lab.callbacks import PostEpochEvaluationCallback
    from forewarn.lab.trainer import Trainer
    from forewarn.measure.options import Measure
    from forewarn.measure.probe import GradientTap, ModuleTap, Pending, Probe, Reading
    from forewarn.measure.schedule import Schedule
    from forewarn.measure.step import Step
    from forewarn.monitor import Monitor
    from forewarn.plan import Plan
    from forewarn.policy import Policy
    from forewarn.preflight_checks.inspection import preflight
    from forewarn.preflight_checks.result import Preflight, PreflightCheck
    from forewarn.settings import Settings, between
    from forewarn.standalone import (
        ActivationDifferenceMetric,
        ActivationMetric,
        GradientMetric,
        GradientMonitor,
        GradientSummary,
        ModuleMonitor,
        MonitorMixin,
        ParameterDifferenceMetric,
        ParameterMetric,
        RefinedCoordinateCheck,
        StorageManager,
        WeightUpdateMonitor,
        compute_gradient_statistics,
        compute_layer_gradient_norms,
        compute_task_gradient_ratio,
        detect_exploding_gradients,
        detect_task_collapse,
        detect_vanishing_gradients,
        monitor_scaled_dot_product_attention,
    )
    from forewarn.store.errors import ResumedError, RunError
    from forewarn.store.reader import Run, open_run
    from forewarn.types import (
        Action,
        Alert,
        AlertState,
        Block,
        Finding,
        FrozenCause,
        Outcome,
        Reason,
        Remedy,
        RunEnd,
        RunInfo,
        RunStart,
        Severity,
    )
    from forewarn.views import View
    from forewarn.views.console import AlertLines, LogLines
    from forewarn.views.live import LiveView
    from forewarn.views.mlflow import MLflowView
    from forewarn.views.prometheus import Prometheus
    from forewarn.views.tensorboard import TensorBoardView
    from forewarn.views.trackio import TrackioView
    from forewarn.views.wandb import WandbView

_HOMES = {
    "watch": "attach",
    **dict.fromkeys(("Cadence", "Metric", "Reduce", "Scope"), "catalogue"),
    **dict.fromkeys(("Rule", "finding", "rule"), "judge.registry"),
    **dict.fromkeys(("Panel", "Series"), "judge.series"),
    "advise": "judge.remedies",
    "anomaly": "judge.rules.anomaly",
    "Message": "judge.headlines",
    **dict.fromkeys(("Settings", "between"), "settings"),
    **dict.fromkeys(("GradientTap", "ModuleTap", "Pending", "Probe", "Reading"), "measure.probe"),
    "Step": "measure.step",
    "Monitor": "monitor",
    **dict.fromkeys(
        (
            "ActivationDifferenceMetric",
            "ActivationMetric",
            "GradientMetric",
            "GradientMonitor",
            "ModuleMonitor",
            "MonitorMixin",
            "ParameterDifferenceMetric",
            "ParameterMetric",
            "RefinedCoordinateCheck",
            "StorageManager",
            "WeightUpdateMonitor",
            "compute_gradient_statistics",
            "compute_layer_gradient_norms",
            "compute_task_gradient_ratio",
            "monitor_scaled_dot_product_attention",
        ),
        "standalone",
    ),
    **dict.fromkeys(("Config", "Snapshots"), "config"),
    "Plan": "plan",
    "Policy": "policy",
    "preflight": "preflight_checks.inspection",
    **dict.fromkeys(("Preflight", "PreflightCheck"), "preflight_checks.result"),
    "Measure": "measure.options",
    "Schedule": "measure.schedule",
    "Run": "store.reader",
    "open_run": "store.reader",
    "ResumedError": "store.errors",
    "RunError": "store.errors",
    "View": "views",
    **dict.fromkeys(("AlertLines", "LogLines"), "views.console"),
    "LiveView": "views.live",
    "MLflowView": "views.mlflow",
    "Prometheus": "views.prometheus",
    "TensorBoardView": "views.tensorboard",
    "TrackioView": "views.trackio",
    "WandbView": "views.wandb",
    "Forecast": "judge.forecast",
    "Trainer": "lab.trainer",
    "PostEpochEvaluationCallback": "lab.callbacks",
    **dict.fromkeys(
        (
            "GradientSummary",
            "detect_exploding_gradients",
            "detect_task_collapse",
            "detect_vanishing_gradients",
        ),
        "judge.gradient_tally",
    ),
    **dict.fromkeys(
        (
            "Action",
            "Alert",
            "AlertState",
            "Block",
            "Finding",
            "FrozenCause",
            "Outcome",
            "Reason",
            "Remedy",
            "RunEnd",
            "RunInfo",
            "RunStart",
            "Severity",
        ),
        "types",
    ),
}

__all__ = [
    "Action",
    "ActivationDifferenceMetric",
    "ActivationMetric",
    "Alert",
    "AlertLines",
    "AlertState",
    "Block",
    "Cadence",
    "Config",
    "Finding",
    "Forecast",
    "FrozenCause",
    "GradientMetric",
    "GradientMonitor",
    "GradientSummary",
    "GradientTap",
    "LiveView",
    "LogLines",
    "MLflowView",
    "Measure",
    "Message",
    "Metric",
    "ModuleMonitor",
    "ModuleTap",
    "Monitor",
    "MonitorMixin",
    "Outcome",
    "Panel",
    "ParameterDifferenceMetric",
    "ParameterMetric",
    "Pending",
    "Plan",
    "Policy",
    "PostEpochEvaluationCallback",
    "Preflight",
    "PreflightCheck",
    "Probe",
    "Prometheus",
    "Reading",
    "Reason",
    "Reduce",
    "RefinedCoordinateCheck",
    "Remedy",
    "ResumedError",
    "Rule",
    "Run",
    "RunEnd",
    "RunError",
    "RunInfo",
    "RunStart",
    "Schedule",
    "Scope",
    "Series",
    "Settings",
    "Severity",
    "Snapshots",
    "Step",
    "StorageManager",
    "TensorBoardView",
    "TrackioView",
    "Trainer",
    "View",
    "WandbView",
    "WeightUpdateMonitor",
    "__version__",
    "advise",
    "anomaly",
    "between",
    "compute_gradient_statistics",
    "compute_layer_gradient_norms",
    "compute_task_gradient_ratio",
    "detect_exploding_gradients",
    "detect_task_collapse",
    "detect_vanishing_gradients",
    "finding",
    "monitor_scaled_dot_product_attention",
    "open_run",
    "preflight",
    "rule",
    "watch",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'forewarn' has no attribute {name!r}")
    try:
        value = getattr(import_module(f"forewarn.{_HOMES[name]}"), name)
    except ModuleNotFoundError as error:
        if error.name == "torch":
            raise ModuleNotFoundError(
                f"forewarn.{name} needs torch: pip install 'forewarn[torch]'", name="torch"
            ) from None
        raise
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
