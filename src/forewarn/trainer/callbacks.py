"""What may act at the points of a training run: callbacks, and early stopping as one of them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from forewarn.trainer.trainer import Trainer


class Callback:
    """Called at the points of a training run; override what you need. The trainer is the only argument.

    `trainer.step`, `trainer.epoch`, `trainer.loss` (a tensor) and `trainer.validation_loss` say where it stands;
    `trainer.stop(reason)` ends training after the step under way.
    """

    def on_train_begin(self, trainer: Trainer) -> None:
        """Before the first step, after a snapshot was restored."""

    def on_epoch_begin(self, trainer: Trainer) -> None:
        """Before the first step of an epoch."""

    def on_step_begin(self, trainer: Trainer) -> None:
        """Before the forward pass of a step."""

    def on_backward_end(self, trainer: Trainer) -> None:
        """After the backward passes of a step, before clipping and the optimizer step."""

    def on_step_end(self, trainer: Trainer) -> None:
        """After the optimizer step."""

    def on_validation_end(self, trainer: Trainer) -> None:
        """After `trainer.validation_loss` is known."""

    def on_epoch_end(self, trainer: Trainer) -> None:
        """After the last step of an epoch and its validation."""

    def on_train_end(self, trainer: Trainer) -> None:
        """After the last step, however training ended."""

    def state_dict(self) -> dict[str, Any]:
        """What must survive a resume: tensors and plain values."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave."""


class CallbackError(RuntimeError):
    """A callback raised; the message names it and the point at which it did."""


class EarlyStopping(Callback):
    """Stops when the validation loss has not improved by `min_delta` for `patience` validations in a row."""

    def __init__(self, patience: int = 3, min_delta: float = 0.0, restore_best: bool = False) -> None:
        if patience < 1:
            raise ValueError(f"EarlyStopping.patience must be at least 1, not {patience}")
        if not min_delta >= 0:
            raise ValueError(f"EarlyStopping.min_delta must not be negative, not {min_delta}")
        self._patience = patience
        self._min_delta = min_delta
        self._restore_best = restore_best
        self.best = math.inf
        """The best validation loss so far."""
        self.waited = 0
        """Validations since then."""
        self._best_weights: dict[str, torch.Tensor] | None = None

    def on_validation_end(self, trainer: Trainer) -> None:
        if trainer.validation_loss < self.best - self._min_delta:
            self.best, self.waited = trainer.validation_loss, 0
            if self._restore_best:
                weights = trainer.model.state_dict()
                self._best_weights = {name: value.detach().clone() for name, value in weights.items()}
            return
        self.waited += 1
        if self.waited >= self._patience:
            trainer.stop(f"no improvement of the validation loss in {self.waited} validations (best {self.best:.4g})")

    def on_train_end(self, trainer: Trainer) -> None:
        if self._best_weights is not None and not trainer.interrupted:
            trainer.model.load_state_dict(self._best_weights)

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "waited": self.waited, "weights": self._best_weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best, self.waited, self._best_weights = state["best"], state["waited"], state["weights"]
