"""Hugging Face: `ForewarnCallback` for `transformers.Trainer` and the trainers built on it, such as those of TRL.

Importing this module also makes `TrainingArguments(report_to="forewarn")` work.
"""

from __future__ import annotations

import functools
import inspect
import logging
import re
import sys
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forewarn.attach import watch
from forewarn.config import Config
from forewarn.integrations.accelerate import paused, replace_method, report_clipping
from forewarn.integrations.trackers import with_trackers
from forewarn.monitor import Monitor
from forewarn.plan import Plan
from forewarn.views.mlflow import MLflowView
from forewarn.views.tensorboard import TensorBoardView
from forewarn.views.trackio import TrackioView
from forewarn.views.wandb import WandbView

try:
    from transformers import Trainer, TrainerCallback
    from transformers.integrations import INTEGRATION_TO_CALLBACK
except ImportError as missing:
    raise ImportError(
        "forewarn.integrations.huggingface needs transformers and accelerate: pip install 'forewarn[huggingface]'"
    ) from missing

_log = logging.getLogger("forewarn")

STATE_NAME = "forewarn.pt"
"""The file with the monitor's state in a checkpoint folder."""

_NOT_RESULTS = ("_runtime", "_per_second", "_time")
"""How the names of evaluation values end that say how fast it was."""
_NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9_.\-]")


class ForewarnCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not there for the type checker
    """Watches the training of a `transformers.Trainer`. `monitor` is the `forewarn.Monitor` of the last training.

    - `run`: the directory to record in; by default `forewarn` in `args.output_dir`.
    - `policy`: what is done about alerts, as for `watch`. With `"stop"`, a critical alert ends the training as an early
      stop does.
    - `trackers`: whether to write to the trackers that the trainer reports to: W&B, MLflow, trackio and TensorBoard.

    All other arguments are those of `forewarn.watch`.
    """

    def __init__(
        self,
        run: str | Path | None = None,
        *,
        every: Any = 100,
        config: Any = None,
        views: Sequence[Any] | None = None,
        policy: Any = None,
        metrics: Sequence[Any] = (),
        rules: Sequence[Any] = (),
        probes: Sequence[Any] = (),
        budget: float | None = None,
        trackers: bool = True,
    ) -> None:
        if run is not None and not isinstance(run, str | Path):
            raise TypeError(f"run must be the path of a directory, not {run!r}; the trainer needs no argument")
        self.monitor: Monitor | None = None
        self._run = run
        self._config = Config.with_rules(config, rules)[0]
        self._options = {
            "every": every, "views": views, "policy": policy, "metrics": metrics, "rules": rules, "probes": probes,
            "budget": budget,
        }  # fmt: skip
        self._trackers = trackers
        self._loss: Tensor | None = None
        """The sum of the micro-batches' losses since the last step, each as the trainer divided it."""
        self._undo: list[Callable[[], None]] = []
        self._finalizer: Any = None
        self._validation_loss: float | None = None
        """The last one since the epoch before ended."""
        self._epochs_ended = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._close("restarted")
        trainer, checkpoint = self._found_trainer()
        model = kwargs["model"] if trainer is None else trainer.model_wrapped
        run = Path(args.output_dir, "forewarn") if self._run is None else Path(self._run)
        saved = _saved(Path(checkpoint or Path(args.output_dir, f"checkpoint-{state.global_step}")), state.global_step)
        overwrite = False
        if saved is not None:
            run = run.with_name(saved["run"])
        elif self.monitor is not None and self.monitor.path is not None and not self.monitor.history.names():
            run, overwrite = self.monitor.path, True  # auto_find_batch_size: the first batch did not fit
        monitor = watch(
            model,
            kwargs["optimizer"],
            run,
            config=self._configured(args, state, kwargs.get("lr_scheduler")),
            scaler=None if trainer is None else trainer.accelerator.scaler,
            resume=saved is not None,
            overwrite=overwrite,
            **self._options | self._views(trainer, state),
        )
        if saved is None:
            monitor.at = state.global_step
        else:
            monitor.load_state_dict(saved["monitor"])
        self.monitor = monitor
        self._loss, self._epochs_ended = None, int(state.epoch or 0)
        self._validation_loss = None if saved is None else saved.get("validation_loss")
        self._finalizer = weakref.finalize(self, _abandon, monitor)
        if trainer is None:
            _log.warning("ForewarnCallback was not called by a Trainer, so the loss is not recorded")
        else:
            self._undo = [
                report_clipping(trainer.accelerator, monitor, model),
                replace_method(trainer, "training_step", self._listening(trainer.training_step)),
                *(
                    replace_method(trainer, name, paused(monitor, kind, getattr(trainer, name)))
                    for name, kind in (("evaluate", "eval"), ("_save_checkpoint", "checkpoint"))
                    if hasattr(trainer, name)
                ),
            ]

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        loss, self._loss = self._loss, None
        if (monitor := self._open_monitor) is not None:
            monitor.step(loss)
            control.should_training_stop |= monitor.should_stop

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Mapping[str, Any], **kwargs: Any) -> None:
        if (monitor := self._open_monitor) is None:  # trainer.evaluate() before or after the training
            return
        loss = metrics.get("eval_loss")
        if loss is not None and state.global_step:
            self._validation_loss = float(loss)
        ends_epoch = self._end_epoch(args, state, control)
        for name, value in metrics.items():
            is_result = isinstance(value, Real) and name.startswith("eval_") and not name.endswith(_NOT_RESULTS)
            if is_result and not (ends_epoch and name == "eval_loss"):
                quantity = _NOT_IN_A_NAME.sub("_", name.removeprefix("eval_"))
                monitor.log(f"eval/{quantity}", float(value), completed=True)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._end_epoch(args, state, control)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._end_epoch(args, state, control)  # on_epoch_end comes later
        folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
        if (monitor := self._open_monitor) is not None and monitor.path is not None and folder.is_dir():
            saved = {
                "run": monitor.path.name,
                "validation_loss": self._validation_loss,
                "monitor": monitor.state_dict(),
            }
            try:
                torch.save(saved, folder / STATE_NAME)
            except Exception as error:
                _log.warning("the monitor's state was not saved with the checkpoint: %s", error)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._close("completed")

    @property
    def _open_monitor(self) -> Monitor | None:
        return self.monitor if self._finalizer is not None and self._finalizer.alive else None

    def _close(self, reason: str) -> None:
        for undo in self._undo:
            undo()
        self._undo = []
        if (monitor := self._open_monitor) is not None:
            monitor.close(reason)
            self._finalizer.detach()

    def _end_epoch(self, args: Any, state: Any, control: Any) -> bool:
        """Judge an epoch once all its steps are done and its validation loss, if it gets one, is known.

        Evaluations may come at any step, so within an epoch, at its last step or after `on_epoch_end`.
        """
        monitor, epoch = self._open_monitor, float(state.epoch or 0)
        if monitor is None or not epoch.is_integer() or epoch <= self._epochs_ended:
            return False
        if self._validation_loss is None and (args.eval_strategy != "no" or monitor.path is None):
            return False  # it is still to come, or another process says that there is none
        monitor.end_epoch(val_loss=self._validation_loss)
        self._validation_loss, self._epochs_ended = None, epoch
        control.should_training_stop |= monitor.should_stop
        return True

    def _listening(self, training_step: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """The trainer's `training_step` that also keeps its loss: callbacks get none, and logs leave out NaN."""

        @functools.wraps(training_step)
        def listening(*args: Any, **kwargs: Any) -> Tensor:
            try:
                loss = training_step(*args, **kwargs)
            except BaseException as error:  # no callback is called after it
                self._close(f"{type(error).__name__}: {error}".rstrip(": "))
                raise
            if isinstance(loss, Tensor) and loss.numel() == 1:
                part = loss.detach().float()
                self._loss = part if self._loss is None else self._loss + part
            return loss

        return listening

    def _found_trainer(self) -> tuple[Any, str | None]:
        """The trainer that is calling, and the checkpoint that it resumes from: callbacks are given neither."""
        frame = inspect.currentframe()
        while frame is not None:
            caller = frame.f_locals.get("self") if frame.f_code.co_varnames[:1] == ("self",) else None
            if isinstance(caller, Trainer) and self in caller.callback_handler.callbacks:
                return caller, frame.f_locals.get("resume_from_checkpoint")
            frame = frame.f_back
        return None, None

    def _views(self, trainer: Any, state: Any) -> dict[str, Any]:
        """The user's views, and those of the trackers that the trainer reports to."""
        if trainer is None or not self._trackers or not state.is_world_process_zero:
            return {}
        return {"views": with_trackers(self._options["views"], _trackers(trainer.callback_handler.callbacks))}

    def _configured(self, args: Any, state: Any, scheduler: Any) -> Config:
        """The user's config with what the trainer knows: the planned learning rate, the batch size, the steps."""
        micro_batch_size = (state.train_batch_size or args.train_batch_size) * args.world_size
        hyperparameters = {
            "total_steps": state.max_steps,
            "micro_batch_size": micro_batch_size,
            "batch_size": micro_batch_size * args.gradient_accumulation_steps,
        }
        config = replace(self._config, hyperparameters=hyperparameters | dict(self._config.hyperparameters))
        if config.measure.plan.total or scheduler is None:
            return config
        try:
            plan = Plan.from_scheduler(scheduler, state.max_steps)
        except Exception as error:  # a schedule that depends on the loss, or one that cannot be copied
            _log.info("no planned learning rate: %s", error)
            return config
        return replace(config, measure=replace(config.measure, plan=plan))


def _trackers(callbacks: Sequence[Any]) -> Iterator[functools.partial[Any]]:
    """What makes a view for each callback that reports to a tracker.

    In W&B the trainer draws over `train/global_step`, so rows of forewarn's own are in nobody's way.
    """
    reporting = {
        name: callback
        for name, kind in INTEGRATION_TO_CALLBACK.items()
        for callback in callbacks
        if isinstance(callback, kind)
    }
    if "wandb" in reporting:
        yield functools.partial(WandbView, own_rows=True)
    if "mlflow" in reporting:
        yield functools.partial(MLflowView)
    if "trackio" in reporting:
        yield functools.partial(TrackioView)
    writer = getattr(reporting.get("tensorboard"), "tb_writer", None)
    folder = getattr(writer, "log_dir", None) or getattr(writer, "logdir", None)  # the latter in tensorboardX
    if folder is not None:
        yield functools.partial(TensorBoardView, Path(folder, "forewarn"))


def _saved(checkpoint: Path, step: int) -> dict[str, Any] | None:
    """What `on_save` left in a checkpoint; None at the start of a training, or if there is nothing to read."""
    if not step or not (checkpoint / STATE_NAME).exists():
        return None
    try:
        return dict(torch.load(checkpoint / STATE_NAME, weights_only=True))
    except Exception as error:
        _log.warning("%s cannot be read (%s), so a new run begins", checkpoint / STATE_NAME, error)
        return None


def _abandon(monitor: Monitor) -> None:
    """Close the run of a training that ended by an exception outside of `training_step`."""
    error = getattr(sys, "last_value", None)
    frames = [frame for frame, _ in traceback.walk_tb(getattr(error, "__traceback__", None))]
    train = inspect.unwrap(Trainer.train).__code__
    is_ours = any(frame.f_code is train for frame in frames)
    monitor.close(f"{type(error).__name__}: {error}".rstrip(": ") if is_ours else "interrupted")


INTEGRATION_TO_CALLBACK["forewarn"] = ForewarnCallback
