"""Packages that monitor a training run, each used as its documentation says, writing only into the turn's folder."""

from __future__ import annotations

import atexit
import os
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forewarn.lab.bench.contender import Contender, Turn
from forewarn.lab.bench.workloads import Training


class TorchModuleMonitor(Contender):
    """`ModuleMonitor` with five statistics of each gradient and the norm of each weight, on every step."""

    name = "torch-module-monitor-tensors"
    description = "gradient norm, mean, std, min, max and weight norm of every tensor"
    package = "torch_module_monitor"
    install = "torch-module-monitor"
    has_outputs = False

    def attach(self, training: Training, turn: Turn) -> None:
        super().attach(training, turn)
        self.monitor: Any = import_module("torch_module_monitor").ModuleMonitor(monitor_step_fn=lambda step: True)
        self.monitor.set_module(training.model)
        self.monitor.add_parameter_metric("norm", torch.linalg.vector_norm)
        for metric in (torch.linalg.vector_norm, torch.mean, torch.std, torch.amin, torch.amax):
            self.monitor.add_gradient_metric(metric.__name__, metric)
            if self.has_outputs:
                self.monitor.add_activation_metric(metric.__name__, metric)
        self.step = 0
        self.monitor.begin_step(0)

    def after_backward(self, loss: Tensor) -> None:
        self.monitor.monitor_parameters()
        self.monitor.monitor_gradients()

    def after_step(self, loss: Tensor) -> None:
        self.monitor.end_step()
        self.latest = self.monitor.get_step_metrics()
        self.step += 1
        self.monitor.begin_step(self.step)

    def close(self) -> None:
        self.monitor.activation_hooks.remove_all_hooks()
        del self.monitor


class TorchModuleMonitorOutputs(TorchModuleMonitor):
    """The same with the output of every module."""

    name = "torch-module-monitor-outputs"
    description = f"{TorchModuleMonitor.description}; norm, mean, std, min and max of every module's output"
    has_outputs = True


class Wandb(Contender):
    """`watch(log="all")` on every step, offline."""

    name = "wandb"
    description = 'wandb.watch(log="all", log_freq=1), offline: histograms of every parameter and gradient'
    package = "wandb"
    install = "wandb"

    def attach(self, training: Training, turn: Turn) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # a benchmark must not send reports
        os.environ.setdefault("WANDB_CACHE_DIR", str(turn.directory))
        super().attach(training, turn)
        wandb: Any = import_module("wandb")
        settings = wandb.Settings(silent=True, console="off", x_disable_stats=True)
        self.run: Any = wandb.init(project="bench", mode="offline", dir=str(turn.directory), settings=settings)
        self.run.watch(training.model, log="all", log_freq=1)

    def after_step(self, loss: Tensor) -> None:
        self.run.log({"loss": loss.item()})

    def close(self) -> None:
        self.run.unwatch(self.training.model)
        self.run.finish()


class Torchmortem(Contender):
    """`Autopsy` with its default sampling: most metrics on every step, expensive ones on one step in 50."""

    name = "torchmortem"
    description = "Autopsy at its defaults: gradients, activations, weights on every step, ranks on one in 50"
    package = "torchmortem"
    install = "torchmortem"
    period = 50

    def attach(self, training: Training, turn: Turn) -> None:
        super().attach(training, turn)
        torchmortem: Any = import_module("torchmortem")
        sampling = torchmortem.SamplingConfig(default_interval=1, expensive_interval=turn.cycle)
        self.autopsy: Any = torchmortem.Autopsy(training.model, optimizer=training.optimizer, sampling=sampling)
        self.autopsy.attach()

    def after_step(self, loss: Tensor) -> None:
        self.autopsy.step(loss=loss.item())

    def close(self) -> None:
        self.autopsy.detach()
        atexit.unregister(self.autopsy._atexit_handler)  # it would keep every turn's model alive until exit
        del self.autopsy


class Trainscope(Contender):
    """`TrainScope` with its defaults: histograms on one step in 50, activations on one in 5.

    With 10 timed steps its activations count as one in 7, slightly less than they cost.
    """

    name = "trainscope"
    description = (
        "TrainScope at its defaults: gradients and weights, activations on one step in 5, histograms on one in 50"
    )
    package = "trainscope"
    install = "trainscope"
    period = 50

    def attach(self, training: Training, turn: Turn) -> None:
        super().attach(training, turn)
        config: Any = import_module("trainscope.core.config").TrainScopeConfig(
            run_dir=str(turn.directory),
            run_name=str(len(os.listdir(turn.directory))),
            histogram_every_n_steps=turn.cycle,
        )
        scope: Any = import_module("trainscope").TrainScope(training.model, training.optimizer, config=config)
        self.scope = scope.attach()

    def after_backward(self, loss: Tensor) -> None:
        self.scope.step(loss.item())

    def close(self) -> None:
        self.scope.detach()
        del self.scope


class Pulsegrad(Contender):
    """`watch` with its defaults; it hooks all modules and optimizers of the process and needs no further call."""

    name = "pulsegrad"
    description = "pulsegrad.watch at its defaults: gradients, weights and activations on one step in 10"
    package = "pulsegrad"
    install = "pulsegrad"
    period = 10
    is_process_wide = True

    def attach(self, training: Training, turn: Turn) -> None:
        os.environ.setdefault("PULSEGRAD_RUNS_DIR", str(turn.directory / "runs"))  # its list of runs
        os.environ.setdefault("PULSEGRAD_CONSOLE", "off")
        super().attach(training, turn)
        pulsegrad: Any = import_module("pulsegrad")
        every = turn.cycle + 1  # it counts steps from one
        self.session = pulsegrad.watch(training.model, training.optimizer, run_dir=Path(turn.directory), k=every)

    def close(self) -> None:
        self.session.close()
        del self.session
