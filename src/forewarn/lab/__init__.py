"""A small reference trainer, its callbacks, and the models and data of the examples."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forewarn.lab.callbacks import (
        Callback,
        CallbackError,
        EarlyStopping,
        GradientMonitorCallback,
        PostEpochEvaluationCallback,
        TrainerCallback,
    )
    from forewarn.lab.trainer import Trainer
    from forewarn.lab.trainer_config import TrainerConfig

_HOMES = {
    "Callback": "callbacks",
    "CallbackError": "callbacks",
    "EarlyStopping": "callbacks",
    "GradientMonitorCallback": "callbacks",
    "PostEpochEvaluationCallback": "callbacks",
    "Trainer": "trainer",
    "TrainerCallback": "callbacks",
    "TrainerConfig": "trainer_config",
}

__all__ = [
    "Callback", "CallbackError", "EarlyStopping", "GradientMonitorCallback", "PostEpochEvaluationCallback", "Trainer",
    "TrainerCallback", "TrainerConfig",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'forewarn.lab' has no attribute {name!r}")
    return getattr(import_module(f"forewarn.lab.{_HOMES[name]}"), name)
