"""A small trainer that shows a monitor in a complete training program, as a starting point for your own."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from forewarn.attach import watch
from forewarn.config import Config
from forewarn.lab.callbacks import Callback, CallbackError
from forewarn.lab.interrupt import interruptible
from forewarn.lab.results import ResultDirectory, delete_results, free_results
from forewarn.lab.snapshots import Snapshots
from forewarn.lab.trainer_config import TrainerConfig
from forewarn.measure.schedule import Schedule
from forewarn.monitor import Monitor
from forewarn.random_states import random_state, restore_random_state
from forewarn.views import View
from forewarn.views.console import AlertLines
from forewarn.views.layer_lines import LayerLines
from forewarn.views.progress import ProgressView

_log = logging.getLogger("forewarn")

Batch = tuple[Tensor, Tensor]
Criterion = Callable[[Tensor, Tensor], Tensor]


def never(step: int) -> bool:
    """The schedule that measures no step in detail."""
    return False


class Trainer:
    """Trains `model` on batches of (inputs, targets) by `criterion(model(inputs), targets)`.

    All results of a run are in `config.directory`: `run/` (readings and alerts), `snapshots/` and, if asked for,
    `tensorboard/`. `train(resume=True)` continues an interrupted run from its newest snapshot, bit for bit as if it had
    not been interrupted.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        criterion: Criterion,
        config: TrainerConfig | Mapping[str, Any] | None = None,
        callbacks: Sequence[Callback] = (),
        *,
        scheduler: Any = None,
        views: Sequence[View] | None = None,
        rules: Sequence[Any] = (),
    ) -> None:
        self.config = TrainerConfig.from_dict(config or {}) if not isinstance(config, TrainerConfig) else config
        self._model_name = self.config.model_name
        self.model = model.to(self.config.device)
        self.optimizer = optimizer
        self.criterion = criterion
        self.callbacks = list(callbacks)
        self.scheduler = scheduler
        """Steps once per optimizer step; a `ReduceLROnPlateau` after each epoch, by the validation loss."""
        self.views = views
        """The views of the run; None for a progress line and alerts."""
        self.rules = rules
        """The user's own rules, as for `watch`."""
        self.monitor: Monitor | None = None
        self.step = 0
        """Optimizer steps done."""
        self.epoch = 0
        """The epoch under way, counted from 0, until `on_epoch_end` included; between epochs, the epochs done."""
        self.loss: Tensor = torch.tensor(math.nan)
        """The mean loss of the last step's batches."""
        self.validation_loss = math.nan
        self.interrupted = False
        """Whether training ended by Ctrl-C."""
        self.stop_reason: str | None = None
        fp16 = self.config.amp == "fp16"
        self.scaler = torch.amp.GradScaler(torch.device(self.config.device).type) if fp16 else None
        self.snapshots = Snapshots(self.config.directory / "snapshots", self.config.keep_last_n_snapshots)
        self._steps_in_epoch = 0
        self._epoch_random: dict[str, Any] = {}
        self._epoch_generators: list[Tensor] = []

    @property
    def is_first(self) -> bool:
        """Whether this process is the only one, or the first of several; it alone writes results."""
        return not _is_distributed() or torch.distributed.get_rank() == 0

    def stop(self, reason: str) -> None:
        """End training after the current step."""
        self.stop_reason = self.stop_reason or reason

    def train(
        self,
        data: Iterable[Batch],
        validation: Iterable[Batch] | None = None,
        *,
        resume: bool = False,
        overwrite: bool = False,
    ) -> None:
        """Train until the epochs or steps are done, a callback or the monitor asks to stop, or Ctrl-C is pressed.

        If `config.directory` holds an earlier run, `resume` goes on with it and `overwrite` deletes it. Otherwise the
        results go beside it, and `config.model_name` becomes their name, such as `model-2`.
        """
        results = self._results(resume, overwrite)
        self.interrupted, self.stop_reason = False, None
        restored = self.snapshots.newest() if resume else None
        if resume and restored is None:
            _log.warning("there is no snapshot in %s to resume from; training begins at the first step", results.path)
            results.put_run_aside()
        self.monitor = self._watch(data, resume=restored is not None)
        if self.is_first:
            results.claim()
        reason = "completed"
        alone = not _is_distributed()  # processes would finish different steps, and wait for each other for ever
        try:
            with self.monitor, interruptible(self) if alone else contextlib.nullcontext():
                if restored is not None:
                    self._restore(restored, data)
                self._call("on_train_begin")
                self._run(data, validation)
                reason = self.stop_reason or reason
                if self.interrupted:
                    self.save_snapshot(data)
                self.monitor.close(reason)
        finally:
            self._call("on_train_end")
        if not self.interrupted and self.config.delete_snapshots_after_training:
            self.snapshots.delete()

    def _results(self, resume: bool, overwrite: bool) -> ResultDirectory:
        """The directory of this run, which then is that of the config."""
        if resume and overwrite:
            raise ValueError("resume keeps the earlier run and overwrite deletes it: give one of them")
        if not resume:
            self._store_as(self._model_name)
        if _is_distributed():
            return self._common_results(resume, overwrite)
        results = ResultDirectory(self.config.directory, self.model)
        if resume:
            results.check()
        elif overwrite:
            delete_results(results.path)
        elif (free := free_results(results.path)) != results.path:
            self._store_as(free.name)
            results = ResultDirectory(self.config.directory, self.model)
        return results

    def _common_results(self, resume: bool, overwrite: bool) -> ResultDirectory:
        """The directory that the first of several processes chooses for all of them."""
        if resume:
            raise ValueError("several processes save no snapshots, so there is nothing to resume from")
        chosen: list[Any] = [None]
        if self.is_first:
            path = self.config.directory
            try:
                if overwrite:
                    delete_results(path)
                chosen = [path.name if overwrite else free_results(path).name]
            except (OSError, ValueError) as error:
                chosen = [error]
        torch.distributed.broadcast_object_list(chosen)
        if isinstance(chosen[0], Exception):
            raise chosen[0]
        self._store_as(chosen[0])
        return ResultDirectory(self.config.directory, self.model)

    def _store_as(self, model_name: str) -> None:
        if model_name != self.config.model_name:
            self.config = dataclasses.replace(self.config, model_name=model_name)
            self.snapshots = Snapshots(self.config.directory / "snapshots", self.config.keep_last_n_snapshots)

    @torch.no_grad()
    def validate(self, data: Iterable[Batch]) -> float:
        """The mean loss over all batches of `data`, the model in evaluation mode."""
        training = self.model.training
        self.model.eval()
        total, count = 0.0, 0
        try:
            for inputs, targets in data:
                with self._autocast():
                    loss = self.criterion(self.model(self._put(inputs)), self._put(targets))
                total, count = total + float(loss) * len(inputs), count + len(inputs)
        finally:
            self.model.train(training)
        return total / count if count else math.nan

    def save_snapshot(self, data: Iterable[Batch] | None = None) -> None:
        """Write everything that an exact resume needs. Several processes save no snapshots."""
        assert self.monitor is not None
        if _is_distributed():
            return
        state: dict[str, Any] = {
            "step": self.step,
            "epoch": self.epoch,
            "steps_in_epoch": self._steps_in_epoch,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict() if self.scheduler is not None else None,
            "scaler": self.scaler.state_dict() if self.scaler is not None else None,
            "random": random_state(),
            "epoch_random": self._epoch_random,
            "epoch_generators": self._epoch_generators,
            "data": getattr(data, "state_dict", lambda: None)(),
            "generators": [generator.get_state() for generator in _generators(data)],
            "monitor": self.monitor.state_dict(),
            "callbacks": {name: callback.state_dict() for name, callback in self._named_callbacks()},
        }
        with self.monitor.pause("checkpoint"):
            self.snapshots.save(self.step, state)

    def _run(self, data: Iterable[Batch], validation: Iterable[Batch] | None) -> None:
        self.model.train()
        while self.epoch < self.config.epochs and not self._done():
            if self._steps_in_epoch == 0:
                self._call("on_epoch_begin")
            is_complete = True
            for batches in self._groups(data):
                self._train_step(batches)
                every = self.config.snapshot_interval
                if every and self.step % every == 0:
                    self.save_snapshot(data)
                if self._done():
                    is_complete = self._steps_in_epoch == self._steps_per_epoch(data)
                    break
            if self.interrupted:
                return
            self._end_epoch(data, validation, is_complete)

    def _end_epoch(self, data: Iterable[Batch], validation: Iterable[Batch] | None, is_complete: bool) -> None:
        """Validate and save; an incomplete epoch is not counted, and a resume continues within it."""
        assert self.monitor is not None
        if is_complete:
            self._steps_in_epoch = 0
        if validation is not None:
            with self.monitor.pause("eval"):
                self.validation_loss = self.validate(validation)
        loss = self.validation_loss if validation is not None else None
        if is_complete:
            self.monitor.end_epoch(val_loss=loss)
        elif loss is not None:
            self.monitor.log("eval/loss", loss, completed=True)
        if validation is not None:
            self._call("on_validation_end")
        if is_complete and isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step(self.validation_loss)
        self._call("on_epoch_end")
        self.epoch += is_complete
        if self.config.snapshot_per_epoch:
            self.save_snapshot(data)

    def _train_step(self, batches: list[Batch]) -> None:
        """One optimizer step over the batches whose gradients are accumulated."""
        assert self.monitor is not None
        self._call("on_step_begin")
        losses = []
        for inputs, targets in batches:
            with self._autocast():
                loss = self.criterion(self.model(self._put(inputs)), self._put(targets))
            self._scaled(loss / len(batches)).backward()
            losses.append(loss.detach())
        self.loss = torch.stack(losses).mean()
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        self._call("on_backward_end")
        self._update()
        self.step += 1
        self._steps_in_epoch += 1
        self._call("on_step_end")
        elements = sum(targets.numel() for _, targets in batches)
        self.monitor.step(self.loss, tokens=elements)
        if self.monitor.should_stop:
            self.stop("the monitor asked to stop")

    def _update(self) -> None:
        assert self.monitor is not None
        if self.config.gradient_clip:
            self.monitor.clip_grad_norm_(self.config.gradient_clip)
        if self.scaler is not None:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()
        if self.scheduler is not None and not isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step()
        self.optimizer.zero_grad()

    def _groups(self, data: Iterable[Batch]) -> Iterator[list[Batch]]:
        """The remaining batches of this epoch, grouped by step."""
        num_done = self._steps_in_epoch
        size = self.config.accumulation_steps
        if num_done and not hasattr(data, "load_state_dict"):
            batches = self._replayed(data, num_done * size)
        else:
            self._epoch_random = random_state()
            self._epoch_generators = [generator.get_state() for generator in _generators(data)]
            batches = iter(data)
        assert self.monitor is not None
        batches = self.monitor.watch_loader(batches)
        limit = self.config.steps_per_epoch
        for _ in range(num_done, limit) if limit is not None else itertools.count():
            group = list(itertools.islice(batches, size))
            if not group:
                return
            yield group

    def _replayed(self, data: Iterable[Batch], count: int) -> Iterator[Batch]:
        """Data that cannot save its position: restarted as at the start of the epoch, and read up to the same place."""
        now = random_state()
        generators = [generator.get_state() for generator in _generators(data)]
        iter(data)  # persistent workers draw a seed when they start, but not at each epoch
        restore_random_state(self._epoch_random)
        for generator, began in zip(_generators(data), self._epoch_generators, strict=False):
            generator.set_state(began)
        batches = iter(data)
        for _ in itertools.islice(batches, count):
            pass
        restore_random_state(now)
        for generator, state in zip(_generators(data), generators, strict=True):
            generator.set_state(state)
        return batches

    def _restore(self, state: dict[str, Any], data: Iterable[Batch]) -> None:
        assert self.monitor is not None
        self.step, self.epoch = state["step"], state["epoch"]
        self._steps_in_epoch = state["steps_in_epoch"]
        self._epoch_random, self._epoch_generators = state["epoch_random"], state["epoch_generators"]
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.scheduler is not None and state["scheduler"] is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        if self.scaler is not None and state["scaler"] is not None:
            self.scaler.load_state_dict(state["scaler"])
        if hasattr(data, "load_state_dict") and state["data"] is not None:
            data.load_state_dict(state["data"])
        self.monitor.load_state_dict(state["monitor"])
        for name, callback in self._named_callbacks():
            if name in state["callbacks"]:
                callback.load_state_dict(state["callbacks"][name])
        for generator, saved in zip(_generators(data), state["generators"], strict=False):
            generator.set_state(saved)
        restore_random_state(state["random"])

    def _named_callbacks(self) -> Iterator[tuple[str, Callback]]:
        """Callbacks by class name and number, the names under which their state is saved."""
        counts: dict[str, int] = {}
        for callback in self.callbacks:
            kind = type(callback).__name__
            counts[kind] = counts.get(kind, 0) + 1
            yield f"{kind}-{counts[kind]}", callback

    def _watch(self, data: Iterable[Batch], *, resume: bool) -> Monitor:
        config = self.config
        return watch(
            self.model,
            self.optimizer,
            config.directory / "run",
            every=_measured_steps(config),
            config=self._monitor_config(data),
            views=self._views(data) if self.views is None else self.views,
            scaler=self.scaler,
            resume=resume,
            rules=self.rules,
        )

    def _views(self, data: Iterable[Batch]) -> list[View]:
        config = self.config
        progress = ProgressView(
            total_steps=self._total_steps(data),
            steps_per_epoch=config.steps_per_epoch,
            every=config.log_interval,
            topk=config.monitor_topk,
        )
        views: list[View] = [progress, AlertLines()]
        if config.log_layers:
            views.append(LayerLines(config.log_layers))
        if config.tensorboard:
            from forewarn.views.tensorboard import TensorBoardView

            folder = config.directory / "tensorboard"
            views.append(TensorBoardView(folder, topk=config.monitor_topk, detail=config.tensorboard_detail))
        return views

    def _monitor_config(self, data: Iterable[Batch]) -> Config:
        config = self.config.monitor_config(self._hyperparameters(data))
        for callback in self.callbacks:
            config = callback.monitor_config(config)
        return config

    def _hyperparameters(self, data: Iterable[Batch]) -> dict[str, float | str | bool]:
        total, per_epoch = self._total_steps(data), self._steps_per_epoch(data)
        declared: dict[str, float | str | bool] = {
            "epochs": total / per_epoch if total and per_epoch else self.config.epochs,
            "gradient_clip": self.config.gradient_clip or 0.0,
            "accumulation_steps": self.config.accumulation_steps,
            "amp": self.config.amp,
        }
        declared |= {} if total is None else {"total_steps": total}
        size = getattr(data, "batch_size", None)
        declared |= {} if size is None else {"micro_batch_size": size}
        return declared

    def _total_steps(self, data: Iterable[Batch]) -> int | None:
        """Total number of training steps, if known."""
        per_epoch = self._steps_per_epoch(data)
        planned = None if per_epoch is None else per_epoch * self.config.epochs
        return min((limit for limit in (planned, self.config.max_steps) if limit is not None), default=None)

    def _steps_per_epoch(self, data: Iterable[Batch]) -> int | None:
        if self.config.steps_per_epoch is None and isinstance(data, Sized):
            return math.ceil(len(data) / self.config.accumulation_steps)
        return self.config.steps_per_epoch

    def _done(self) -> bool:
        steps = self.config.max_steps
        return self.interrupted or self.stop_reason is not None or (steps is not None and self.step >= steps)

    def _call(self, event: str) -> None:
        for callback in self.callbacks:
            try:
                getattr(callback, event)(self)
            except Exception as error:
                name = type(callback).__name__
                raise CallbackError(
                    f"the callback {name} failed in {event}: {type(error).__name__}: {error}"
                ) from error

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.config.amp == "off":
            return contextlib.nullcontext()
        dtype = torch.bfloat16 if self.config.amp == "bf16" else torch.float16
        return torch.autocast(torch.device(self.config.device).type, dtype=dtype)

    def _scaled(self, loss: Tensor) -> Tensor:
        return loss if self.scaler is None else self.scaler.scale(loss)

    def _put(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.config.device, non_blocking=True)


def _is_distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _measured_steps(config: TrainerConfig) -> Callable[[int], bool]:
    """The steps on which every tensor is measured: the weight monitor's, and those whose layers are printed."""
    base = Schedule(every=config.weight_monitor_interval) if config.enable_weight_monitor else never
    every = config.log_layers
    return (lambda step: base(step) or (step + 1) % every == 0) if every else base


def _generators(data: Any) -> list[torch.Generator]:
    """The random generators of a DataLoader and its sampler."""
    places = (data, getattr(data, "sampler", None), getattr(getattr(data, "batch_sampler", None), "sampler", None))
    generators = [getattr(place, "generator", None) for place in places]
    return list(dict.fromkeys(generator for generator in generators if isinstance(generator, torch.Generator)))
