"""Callbacks at fixed points of a training run, including early stopping and the evaluation of epochs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from rich.text import Text

from forewarn.config import Config
from forewarn.judge.epochs import NO_VALIDATION_LOSS, Epoch, Patience, epochs
from forewarn.judge.gradient_tally import EXPLODING, VANISHING, also_named
from forewarn.measure.peers import num_ranks
from forewarn.standalone.gradient_monitor import GradientMonitor
from forewarn.types import Action
from forewarn.views.console import plain_console, print_lines
from forewarn.views.epoch_lines import advice_lines

if TYPE_CHECKING:
    from forewarn.lab.trainer import Trainer
    from forewarn.monitor import Monitor


class Callback:
    """Called at fixed points of a training run; override what you need. The trainer is the only argument.

    `trainer.step`, `trainer.epoch`, `trainer.loss` (a tensor) and `trainer.validation_loss` show the progress;
    `trainer.stop(reason)` ends training after the current step. Steps and epochs count from 0 here, and from
    1 in printed text.
    """

    def monitor_config(self, config: Config) -> Config:
        """The monitor's settings, changed as this callback needs; called before the monitor is attached."""
        return config

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
        """Restore a `state_dict`."""


TrainerCallback = Callback


class CallbackError(RuntimeError):
    """A callback raised; the message names the callback and the point."""


class EarlyStopping(Callback):
    """Stops when the validation loss has not improved by `min_delta` for `patience` validations in a row."""

    def __init__(self, patience: int = 3, min_delta: float = 0.0, restore_best: bool = False) -> None:
        if patience < 1:
            raise ValueError(f"EarlyStopping.patience must be at least 1, not {patience}")
        if not min_delta >= 0:
            raise ValueError(f"EarlyStopping.min_delta must not be negative, not {min_delta}")
        self._patience = Patience(patience, min_delta)
        self._restore_best = restore_best
        self._best_weights: dict[str, torch.Tensor] | None = None

    @property
    def best(self) -> float:
        """The best validation loss so far."""
        return self._patience.best

    @property
    def waited(self) -> int:
        """Number of validations since the best one."""
        return self._patience.waited

    def on_validation_end(self, trainer: Trainer) -> None:
        is_over = self._patience.is_over(trainer.validation_loss)
        if self.waited == 0 and self._restore_best:
            weights = trainer.model.state_dict()
            self._best_weights = {name: value.detach().clone() for name, value in weights.items()}
        if is_over:
            trainer.stop(f"no improvement of the validation loss in {self.waited} validations (best {self.best:.4g})")

    def on_train_end(self, trainer: Trainer) -> None:
        if self._best_weights is not None and not trainer.interrupted:
            trainer.model.load_state_dict(self._best_weights)

    def state_dict(self) -> dict[str, Any]:
        return {**self._patience.state_dict(), "weights": self._best_weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._patience.load_state_dict(state)
        self._best_weights = state["weights"]


class GradientMonitorCallback(Callback):
    """Follows the gradients with a `forewarn.GradientMonitor`: a line every so many steps, and a summary at the end.

    It reads gradients before they are clipped. Both go to standard error; without `verbose` there is only the summary.
    `log_frequency` may be called `log_freq`.
    """

    @also_named(log_freq="log_frequency")
    def __init__(
        self,
        log_frequency: int = 100,
        vanishing_threshold: float = VANISHING,
        exploding_threshold: float = EXPLODING,
        verbose: bool = True,
    ) -> None:
        console = plain_console(stderr=True)
        self.monitor = GradientMonitor(
            log_frequency, vanishing_threshold, exploding_threshold, verbose=verbose, unit="step",
            show=lambda line: print_lines(console, [Text(line)]),
        )  # fmt: skip

    def on_backward_end(self, trainer: Trainer) -> None:
        self.monitor.update(trainer.step + 1, trainer.model)

    def on_train_end(self, trainer: Trainer) -> None:
        print_lines(plain_console(stderr=True), [Text(line) for line in str(self.monitor.get_summary()).splitlines()])

    def state_dict(self) -> dict[str, Any]:
        return self.monitor.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.monitor.load_state_dict(state)


class PostEpochEvaluationCallback(Callback):
    """Prints an evaluation of some epochs and what to do about them.

    Every epoch is recorded and judged, with and without this callback. It sets the bounds of that judgement and prints
    the epochs in `evaluation_epochs` (None: all) to standard error. With `auto_adjust` it applies the adjustments that
    warnings about epochs advise; see `monitor.adjust`. Epochs count from 0, as in `range(epochs)`, and
    are printed from 1. A threshold of None takes the monitor's own setting.
    """

    def __init__(
        self,
        evaluation_epochs: Collection[int] | None = (1, 2),
        improvement_threshold: float | None = None,
        gap_threshold: float | None = None,
        plateau_window: int | None = None,
        auto_adjust: bool = False,
    ) -> None:
        name = type(self).__name__
        if any(isinstance(epoch, bool) or not isinstance(epoch, int) or epoch < 0 for epoch in evaluation_epochs or ()):
            raise ValueError(f"{name}.evaluation_epochs must be epochs from 0 on, not {evaluation_epochs!r}")
        if improvement_threshold is not None and not 0 <= improvement_threshold <= 1:
            raise ValueError(f"{name}.improvement_threshold must be between 0 and 1, not {improvement_threshold}")
        if gap_threshold is not None and not gap_threshold >= 0:
            raise ValueError(f"{name}.gap_threshold must not be negative, not {gap_threshold}")
        if plateau_window is not None and plateau_window < 2:
            raise ValueError(f"{name}.plateau_window must be at least 2 epochs, not {plateau_window}")
        self._evaluation_epochs = None if evaluation_epochs is None else frozenset(evaluation_epochs)
        self._improvement_threshold = improvement_threshold
        self._gap_threshold = gap_threshold
        self._plateau_window = plateau_window
        self._auto_adjust = auto_adjust
        self.evaluations: list[Epoch] = []
        """The epochs that were shown."""
        self.adjustments: list[Action] = []
        """The adjustments made to the run."""

    def monitor_config(self, config: Config) -> Config:
        bounds, threshold = config.thresholds, self._improvement_threshold
        thresholds = dataclasses.replace(
            bounds,
            overfitting=_replaced(bounds.overfitting, gap=self._gap_threshold),
            generalization_gap=_replaced(bounds.generalization_gap, gap=self._gap_threshold),
            slow_improvement=_replaced(bounds.slow_improvement, improvement=threshold),
            validation_plateau=_replaced(bounds.validation_plateau, change=threshold, window=self._plateau_window),
        )
        return dataclasses.replace(config, thresholds=thresholds)

    def on_epoch_end(self, trainer: Trainer) -> None:
        monitor = trainer.monitor
        assert monitor is not None
        bounds = monitor.config.thresholds
        judged = epochs(
            monitor.history.series, poor=bounds.slow_improvement.improvement, severe=bounds.generalization_gap.gap,
            change=bounds.validation_plateau.change, window=bounds.validation_plateau.window,
        )  # fmt: skip
        is_new = judged and judged[-1].number == trainer.epoch + 1 and judged[-1].step == trainer.step - 1
        if self._evaluation_epochs is not None and trainer.epoch not in self._evaluation_epochs:
            return
        if is_new:
            self._show(judged[-1], monitor)
        if self._auto_adjust and (is_new or num_ranks() > 1):  # all ranks ask, and only one of them has judged
            self.adjustments += monitor.adjust(trainer.scheduler)

    def _show(self, newest: Epoch, monitor: Monitor) -> None:
        self.evaluations.append(newest)
        lines = [Text(newest.words()), *advice_lines(monitor.firing)]
        if math.isnan(newest.validation_loss):
            lines.append(Text(f"  {NO_VALIDATION_LOSS}"))
        print_lines(plain_console(stderr=True), lines)


Bounds = TypeVar("Bounds", bound=Any)


def _replaced(bounds: Bounds, **values: float | None) -> Bounds:
    """The thresholds of a rule with those of these values that are given."""
    return dataclasses.replace(bounds, **{name: value for name, value in values.items() if value is not None})
