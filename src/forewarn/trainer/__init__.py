"""A small reference trainer, its callbacks, and the models and data of the examples."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forewarn.trainer.callbacks import Callback, CallbackError, EarlyStopping, PostEpochEvaluationCallback
    from forewarn.trainer.config import TrainerConfig
    from forewarn.trainer.trainer import Trainer

_HOMES = {
    "Callback": "callbacks",
    "CallbackError": "callbacks",
    "EarlyStopping": "callbacks",
    "PostEpochEvaluationCallback": "callbacks",
    "Trainer": "trainer",
    "TrainerConfig": "config",
}

__all__ = ["Callback", "CallbackError", "EarlyStopping", "PostEpochEvaluationCallback", "Trainer", "TrainerConfig"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'forewarn.trainer' has no attribute {name!r}")
    return getattr(import_module(f"forewarn.trainer.{_HOMES[name]}"), name)
