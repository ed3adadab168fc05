"""What a training script of the benchmark talks to: the places where faults come in, and the monitor."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from forewarn.attach import watch
from forewarn.lab.faults.change import Change
from forewarn.monitor import Monitor
from forewarn.types import Alert

EVERY = 10
"""Steps between detailed measurements, as the guide advises for short runs."""

_RATES_OF_GROUPS = ("lr", "initial_lr", "max_lr", "min_lr")
_RATES_OF_SCHEDULERS = ("base_lrs", "max_lrs", "_last_lr")


class Schedule(Protocol):
    """A learning-rate scheduler of torch."""

    step: Callable[..., None]


class Session:
    """One run of a training script.

    A script says where it is by calling these methods at their natural places, and is otherwise plain training code.
    With no changes, each of them returns what it was given.
    """

    def __init__(
        self, seed: int, num_steps: int, changes: Sequence[Change] = (), run: Path | None = None, every: int = EVERY,
        policy: str = "observe",
    ) -> None:  # fmt: skip
        self.seed = seed
        self.num_steps = num_steps
        self.step = 0
        """The current step; the first is 0."""
        self.objective: list[float] = []
        """What is to fall, at each step: the loss, or what the script reports instead."""
        self.optimizers: list[Optimizer] = []
        self.schedules: list[Schedule] = []
        self.model: nn.Module = nn.Module()
        self.refusal = ""
        """Why `watch` refused to watch; empty if it did not."""
        self._changes = tuple(changes)
        self._run = run
        self._every = every
        self._policy = policy
        self._watching: tuple[nn.Module, Any, dict[str, Any]] | None = None
        self.monitor: Monitor | None = None
        self._lr_factor = 1.0
        self._reports_objective = False

    def number(self, name: str, value: float) -> float:
        for change in self._changes:
            value = change.number(name, value)
        return value * self._lr_factor if name == "lr" else value

    def count(self, name: str, value: int) -> int:
        return max(1, round(self.number(name, value)))

    def built(self, model: nn.Module) -> None:
        """The model that is watched; call it once, before the optimizers are made."""
        self.model = model
        for change in self._changes:
            change.model(model)

    def optimizer(self, optimizer: Optimizer) -> None:
        self.optimizers.append(optimizer)
        for change in self._changes:
            change.optimizer(optimizer, self.model, self)

    def schedule(self, schedule: Any) -> None:
        self.schedules.append(schedule)
        for change in self._changes:
            change.schedule(schedule)

    def pipeline(self, inputs: Tensor) -> Tensor:
        for change in self._changes:
            inputs = change.pipeline(inputs)
        return inputs

    def order(self, order: Tensor, labels: Tensor) -> Tensor:
        for change in self._changes:
            order = change.order(order, labels)
        return order

    def batch(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        for change in self._changes:
            inputs, targets = change.batch(self.step, inputs, targets)
        return inputs, targets

    def loss(self, loss: Tensor) -> Tensor:
        for change in self._changes:
            loss = change.loss(self.step, loss)
        return loss

    def report(self, objective: float) -> None:
        """What this step is worth, if that is not the loss; lower is better."""
        self._reports_objective = True
        self.objective.append(objective)

    def watch(self, model: nn.Module, optimizer: Any = None, **options: Any) -> Watched:
        """`forewarn.watch`, with the directory of this run; without one, a monitor that does nothing."""
        self._watching = (model, self.optimizers if optimizer is None else optimizer, options)
        self._attach(resume=False)
        for change in self._changes:
            change.watched(self)
        return Watched(self)

    def _attach(self, resume: bool) -> None:
        if self._run is None or self._watching is None:
            return
        model, optimizer, options = self._watching
        try:
            self.monitor = watch(
                model, optimizer, self._run, every=self._every, views=[], resume=resume, policy=self._policy, **options
            )
        except ValueError as error:  # it says what is wrong with the model or the optimizer
            self.refusal = str(error)

    def resume(self) -> None:
        """End the monitored run and continue it, as a script does that was started again from a checkpoint."""
        if self.monitor is not None:
            self.monitor.close()
            self._attach(resume=True)

    def scale_lr(self, factor: float) -> None:
        """Multiply every learning rate, and what the schedulers compute them from."""
        self._lr_factor *= factor
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group.update({name: group[name] * factor for name in _RATES_OF_GROUPS if name in group})
        for schedule in self.schedules:
            for name in _RATES_OF_SCHEDULERS:
                if isinstance(rates := getattr(schedule, name, None), list):
                    setattr(schedule, name, [rate * factor for rate in rates])

    def complete(self, loss: float) -> None:
        """A step is over."""
        if not self._reports_objective:
            self.objective.append(loss)
        elif len(self.objective) <= self.step:
            self.objective.append(self.objective[-1] if self.objective else math.nan)
        for change in self._changes:
            change.completed(self.step, self)
        self.step += 1

    def close(self) -> None:
        if self.monitor is not None:
            self.monitor.close()

    def is_over(self) -> bool:
        """Whether all steps have been taken."""
        return self.step >= self.num_steps


class Watched:
    """The monitor as a script uses it. It survives a resume, and does nothing in a run without a monitor."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def step(self, loss: Tensor | float, **extra: Tensor | float) -> None:
        if (monitor := self._session.monitor) is not None:
            monitor.step(loss, **extra)
        self._session.complete(float(loss.detach()) if isinstance(loss, Tensor) else loss)

    def end_epoch(self, *, train_loss: float | None = None, val_loss: float | None = None) -> None:
        if (monitor := self._session.monitor) is not None:
            monitor.end_epoch(train_loss=train_loss, val_loss=val_loss)

    def combine_losses(self, losses: Mapping[str, Tensor], weights: Mapping[str, float]) -> Tensor:
        if (monitor := self._session.monitor) is not None:
            return monitor.combine_losses(losses, weights=weights)
        return torch.stack([weights[name] * loss for name, loss in losses.items()]).sum()

    @property
    def alerts(self) -> tuple[Alert, ...]:
        monitor = self._session.monitor
        return () if monitor is None else monitor.alerts


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Any:
    """Evaluation mode without gradients, and training mode again afterwards."""
    model.eval()
    with torch.no_grad():
        yield
    model.train()
