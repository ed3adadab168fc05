"""forewarn tells you what is going wrong in a training run before it is lost, why, and what to do about it.

Public names are resolved when they are first used: `import forewarn` imports neither torch nor numpy.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from forewarn.actions import Policy
    from forewarn.attach import watch
    from forewarn.config import Config
    from forewarn.gradient_tally import (
        GradientSummary,
        detect_exploding_gradients,
        detect_task_collapse,
        detect_vanishing_gradients,
    )
    from forewarn.monitor import Monitor
    from forewarn.probes.gradient_monitor import (
        GradientMonitor,
        compute_gradient_statistics,
        compute_layer_gradient_norms,
        compute_task_gradient_ratio,
    )
    from forewarn.probes.weight_update_monitor import WeightUpdateMonitor
    from forewarn.schedule import Schedule
    from forewarn.store.reader import Run, open_run
    from forewarn.types import Alert, Block, Facts, Finding, FrozenCause, Outcome, Remedy, Severity, State

_HOMES = {
    "watch": "attach",
    "Monitor": "monitor",
    "WeightUpdateMonitor": "probes.weight_update_monitor",
    "Config": "config",
    "Policy": "actions",
    "Schedule": "schedule",
    "Run": "store.reader",
    "open_run": "store.reader",
    **dict.fromkeys(
        (
            "GradientMonitor",
            "compute_gradient_statistics",
            "compute_layer_gradient_norms",
            "compute_task_gradient_ratio",
        ),
        "probes.gradient_monitor",
    ),
    **dict.fromkeys(
        (
            "GradientSummary",
            "detect_exploding_gradients",
            "detect_task_collapse",
            "detect_vanishing_gradients",
        ),
        "gradient_tally",
    ),
    **dict.fromkeys(
        ("Alert", "Block", "Facts", "Finding", "FrozenCause", "Outcome", "Remedy", "Severity", "State"), "types"
    ),
}

__all__ = [
    "Alert",
    "Block",
    "Config",
    "Facts",
    "Finding",
    "FrozenCause",
    "GradientMonitor",
    "GradientSummary",
    "Monitor",
    "Outcome",
    "Policy",
    "Remedy",
    "Run",
    "Schedule",
    "Severity",
    "State",
    "WeightUpdateMonitor",
    "__version__",
    "compute_gradient_statistics",
    "compute_layer_gradient_norms",
    "compute_task_gradient_ratio",
    "detect_exploding_gradients",
    "detect_task_collapse",
    "detect_vanishing_gradients",
    "open_run",
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
