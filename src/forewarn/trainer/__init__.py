"""The reference trainer under the name that people look for: everything here lives in `forewarn.lab`."""

from forewarn.lab import (
    Callback,
    CallbackError,
    EarlyStopping,
    GradientMonitorCallback,
    PostEpochEvaluationCallback,
    Trainer,
    TrainerCallback,
    TrainerConfig,
)

__all__ = [
    "Callback", "CallbackError", "EarlyStopping", "GradientMonitorCallback", "PostEpochEvaluationCallback", "Trainer",
    "TrainerCallback", "TrainerConfig",
]  # fmt: skip
