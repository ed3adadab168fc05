"""Lightning: `ForewarnCallback` for the `Trainer` of `lightning.pytorch` and of `pytorch_lightning`."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from forewarn.attach import watch
from forewarn.config import Config
from forewarn.integrations.trackers import with_trackers
from forewarn.measure.hooks import Hooks
from forewarn.measure.probes.stepping import present_scale
from forewarn.monitor import Monitor
from forewarn.plan import Plan
from forewarn.views.mlflow import MLflowView
from forewarn.views.tensorboard import TensorBoardView
from forewarn.views.wandb import WandbView

try:
    from lightning.pytorch.callbacks import Callback
except ImportError:
    try:
        from pytorch_lightning.callbacks import Callback
    except ImportError:
        raise ModuleNotFoundError(
            "forewarn.integrations.lightning needs Lightning: pip install 'forewarn[lightning]'", name="lightning"
        ) from None

_log = logging.getLogger("forewarn")

_VALIDATION_LOSS = re.compile(
    r"(val|valid|validation|eval|dev)[-_/. ]?loss(_epoch)?|loss[-_/. ](val|valid|validation|eval|dev)(_epoch)?", re.I
)
"""The usual names of a validation loss."""


class ForewarnCallback(Callback):  # type: ignore[misc]  # the type checker runs without Lightning
    """Watches every `trainer.fit`. `monitor` is the `forewarn.Monitor` of the last one.

    - `val_loss`: the name under which the module logs its validation loss. Usual names, such as `val_loss` and
      `valid/loss`, are found without it.
    - `policy`: what is done about alerts, as for `watch`. With `"stop"`, a critical alert sets `trainer.should_stop`.
    - `trackers`: whether to write to the loggers of the trainer: W&B, MLflow and TensorBoard.

    All other arguments are those of `forewarn.watch`.
    """

    def __init__(
        self,
        run: str | Path | None = None,
        *,
        val_loss: str | None = None,
        every: Any = 100,
        config: Any = None,
        views: Sequence[Any] | None = None,
        policy: Any = None,
        overwrite: bool = False,
        metrics: Sequence[Any] = (),
        rules: Sequence[Any] = (),
        probes: Sequence[Any] = (),
        budget: float | None = None,
        trackers: bool = True,
    ) -> None:
        if run is not None and not isinstance(run, str | Path):
            raise TypeError(f"run must be the path of a directory, not {run!r}; the trainer needs no argument")
        if val_loss is not None and not isinstance(val_loss, str):
            raise TypeError(f"val_loss must be the name of a logged metric, not {val_loss!r}")
        self.monitor: Monitor | None = None
        self._open: Monitor | None = None
        """The monitor while it watches."""
        self._hooks = Hooks()
        self._pauses = ExitStack()
        """The pause of a validation that is running."""
        self._run = None if run is None else str(run)
        self._val_loss = val_loss
        self._config = Config.with_rules(config, rules)[0]
        self._overwrite = overwrite
        self._options = {
            "every": every, "views": views, "policy": policy, "metrics": metrics, "rules": rules, "probes": probes,
            "budget": budget,
        }  # fmt: skip
        self._trackers = trackers
        self._saved: dict[str, Any] | None = None
        """The state in the checkpoint that `trainer.fit` resumes."""
        self._global_step = 0
        self._has_stepped = False
        self._epoch_ended = -1
        """The last epoch that was passed to `monitor.end_epoch`."""
        self._backward_loss: Tensor | float = 0.0
        """The sum of the losses of the backward passes since an optimizer last stepped."""
        self._num_passes = 0
        self._losses: dict[int, Tensor | float] = {}
        """By id of the optimizer, the loss of its latest step."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Attach the monitor. Earlier, the optimizers are not restored and a search for a learning rate may follow."""
        self._close("restarted")
        saved, self._saved = self._saved, None
        weights = set(map(id, pl_module.parameters()))
        optimizers = [optimizer for optimizer in trainer.optimizers if _holds(optimizer, weights)]
        if not optimizers:  # configure_optimizers may return None
            _log.warning("no optimizer holds a parameter of %s, so it is not watched", type(pl_module).__name__)
            return
        config = self._config
        if not config.measure.plan.total and (saved is not None or trainer.global_step == 0):
            config = replace(config, measure=replace(config.measure, plan=_plan(trainer, pl_module)))
        continued = self._continued(saved)
        options = self._options
        if self._trackers and trainer.is_global_zero:
            options = options | {"views": with_trackers(options["views"], _trackers(trainer.loggers))}
        called = trainer.strategy.model
        model = (
            called if type(called).__name__ == "FullyShardedDataParallel" else pl_module
        )  # it alone knows its shards
        monitor = watch(
            model, optimizers, continued or self._run, config=config, scaler=_scaler(trainer),
            resume=continued is not None, overwrite=self._overwrite and continued is None, **options,
        )  # fmt: skip
        self.monitor = self._open = monitor
        if trainer.strategy.model is pl_module:  # Lightning calls only training_step; under DDP also the module itself
            monitor._loop.search()
        if saved is not None:
            monitor.load_state_dict(saved["monitor"])
        elif pl_module.automatic_optimization:
            monitor.at = trainer.global_step
        self._global_step = trainer.global_step
        self._epoch_ended = -1 if saved is None else saved["epoch_ended"]
        self._backward_loss, self._num_passes, self._losses, self._has_stepped = 0.0, 0, {}, False
        for optimizer in optimizers:
            self._hooks.put(optimizer, "register_step_post_hook", self._stepped)

    def _continued(self, saved: dict[str, Any] | None) -> str | None:
        """The directory of the run that a checkpoint continues, unless it is gone or another one was asked for."""
        if saved is None or saved["run"] is None or saved["asked"] != self._run:
            return None
        return str(saved["run"]) if (Path(saved["run"]) / "run.json").exists() else None

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        if self._open is not None and loss.numel() == 1:
            scale = present_scale(_scaler(trainer), None)
            value = loss.detach().reshape(()).to(torch.promote_types(loss.dtype, torch.float32))
            self._backward_loss = self._backward_loss + (value if scale is None else value / scale)
            self._num_passes += 1

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Optimizer) -> None:
        """Gradients are complete and not clipped yet. LBFGS comes here several times per step; its last loss counts."""
        if self._open is None:
            return
        self._take_loss(trainer, pl_module, id(optimizer))
        clip = trainer.gradient_clip_val
        by_norm = trainer.gradient_clip_algorithm in (None, "norm")
        if clip and by_norm and pl_module.automatic_optimization and _is_own(pl_module, "configure_gradient_clipping"):
            self._open.clipped(None, clip)

    def _take_loss(self, trainer: Any, pl_module: Any, key: int) -> None:
        """Keep the loss that an optimizer steps with: the sum over its backward passes.

        Lightning divides each loss by the number of micro-batches. At the end of an epoch there may be fewer of them,
        and the mean over these is kept.
        """
        if self._num_passes:
            expected = trainer.accumulate_grad_batches if pl_module.automatic_optimization else self._num_passes
            self._losses[key] = self._backward_loss * (expected / self._num_passes)
            self._backward_loss, self._num_passes = 0.0, 0

    def _stepped(self, *_: Any) -> None:
        self._has_stepped = True

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Complete a step if any optimizer stepped: in manual optimization several may do so per batch.

        `global_step` also counts steps that a scaler skipped, but none of optimizers used without Lightning's wrapper.
        """
        if self._open is None or not (self._has_stepped or trainer.global_step != self._global_step):
            return
        self._global_step, self._has_stepped = trainer.global_step, False
        self._take_loss(trainer, pl_module, 0)
        self._open.step(sum(self._losses.values()) if self._losses else _returned_loss(outputs))
        if len(trainer.optimizers) == 1:
            self._losses = {}  # one of several may step less often, and its loss still counts
        if self._open.should_stop:
            trainer.should_stop = True

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        if self._open is not None:
            self._pauses.enter_context(self._open.pause("eval"))

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self._pauses.close()
        if self._open is None or trainer.sanity_checking:
            return
        loss = self._validation_loss(trainer.callback_metrics)
        if trainer.is_last_batch and len(trainer.optimizers) == 1:
            self._end_epoch(trainer, loss)
        elif loss is not None:
            self._open.log("eval/loss", loss, completed=True)

    def _validation_loss(self, metrics: Mapping[str, Tensor]) -> Tensor | None:
        if self._val_loss is None:
            return next((value for name, value in metrics.items() if _VALIDATION_LOSS.fullmatch(name)), None)
        if self._val_loss not in metrics:
            names = ", ".join(metrics) or "nothing"
            _log.warning(
                "the module logs no %r, which is ForewarnCallback's val_loss; it logs %s", self._val_loss, names
            )
        return metrics.get(self._val_loss)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Complete an epoch unless its validation did. Several optimizers have no common loss to judge it by."""
        if self._open is not None and self._epoch_ended < trainer.current_epoch and len(trainer.optimizers) == 1:
            self._end_epoch(trainer, None)

    def _end_epoch(self, trainer: Any, val_loss: Tensor | None) -> None:
        assert self._open is not None
        self._epoch_ended = trainer.current_epoch
        if trainer.is_global_zero:
            self._open.end_epoch(val_loss=val_loss)
        if trainer.strategy.reduce_boolean_decision(self._open.should_stop, all=False):
            trainer.should_stop = True

    def state_dict(self) -> dict[str, Any]:
        if self._open is None:
            return {}
        path = self._open.path
        return {
            "asked": self._run,
            "run": None if path is None else str(path),
            "epoch_ended": self._epoch_ended,
            "monitor": self._open.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state for `on_train_start`: Lightning restores callbacks before the model is set up."""
        self._saved = state_dict or None

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        self._close("completed")

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._close(f"{type(exception).__name__}: {exception}".rstrip(": "))

    def _close(self, reason: str) -> None:
        self._hooks.remove()
        self._pauses.close()
        if self._open is not None:
            self._open.close(reason)
            self._open = None

    def __getstate__(self) -> dict[str, Any]:
        """Without the monitor, for the processes that a strategy such as `ddp_spawn` starts."""
        return self.__dict__ | {"monitor": None, "_open": None, "_hooks": Hooks(), "_pauses": ExitStack()}


def _trackers(loggers: Sequence[Any]) -> Iterator[partial[Any]]:
    """What makes a view for each logger, of either package.

    In W&B Lightning draws over `trainer/global_step`, so rows of forewarn's own are in nobody's way.
    """
    for logger in loggers:
        kinds = {kind.__name__ for kind in type(logger).__mro__}
        if "WandbLogger" in kinds:
            yield partial(WandbView, logger.experiment, own_rows=True)
        elif "MLFlowLogger" in kinds:
            yield partial(MLflowView, logger.run_id, client=logger.experiment)
        elif "TensorBoardLogger" in kinds:
            yield partial(TensorBoardView, Path(logger.log_dir, "forewarn"))


def _returned_loss(outputs: Any) -> Tensor | None:
    """The loss that `training_step` returned."""
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else None
    return loss if isinstance(loss, Tensor) and loss.numel() == 1 else None


def _holds(optimizer: Optimizer, weights: set[int]) -> bool:
    return any(id(parameter) in weights for group in optimizer.param_groups for parameter in group["params"])


def _scaler(trainer: Any) -> Any:
    return getattr(trainer.precision_plugin, "scaler", None)


def _is_own(pl_module: Any, method: str) -> bool:
    """Whether this method is Lightning's own, not one of the user's."""
    return bool(getattr(type(pl_module), method).__qualname__ == f"LightningModule.{method}")


def _plan(trainer: Any, pl_module: Any) -> Plan:
    """The planned learning rate, from the only scheduler; an empty plan if it cannot be known before the run."""
    configs = trainer.lr_scheduler_configs
    if len(configs) != 1 or not pl_module.automatic_optimization or not _is_own(pl_module, "lr_scheduler_step"):
        return Plan()
    (config,) = configs
    try:
        total = trainer.estimated_stepping_batches
        if config.reduce_on_plateau or not 0 < total < math.inf:
            return Plan()
        if config.interval == "step":
            return Plan.from_scheduler(config.scheduler, total) if config.frequency == 1 else Plan()
        steps = math.ceil(trainer.num_training_batches / trainer.accumulate_grad_batches)
        return Plan.from_scheduler(
            _SlowScheduler(config.scheduler, steps * config.frequency, trainer.global_step), total
        )
    except Exception as error:  # such as a scheduler that cannot be copied
        _log.debug("the learning rate has no plan: %s", error)
        return Plan()


class _SlowScheduler:
    """A scheduler that steps once per epoch, for `Plan.from_scheduler`, which counts optimizer steps."""

    def __init__(self, scheduler: Any, every: int, global_step: int) -> None:
        self.optimizer = scheduler.optimizer
        self._scheduler = scheduler
        self._every = every
        self.last_epoch = scheduler.last_epoch * every + global_step % every

    def step(self) -> None:
        self.last_epoch += 1
        if self.last_epoch % self._every == 0:
            self._scheduler.step()
