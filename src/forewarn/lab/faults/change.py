"""What can be changed in a training script, and the draws that decide when and how much."""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.optim import Optimizer

if TYPE_CHECKING:
    from forewarn.lab.faults.session import Schedule, Session

EARLIEST_SHARE, LATEST_SHARE = 0.3, 0.6
"""The part of a run in which a change begins that is not there from the start."""


class Draw:
    """Random numbers for one change in one run, apart from those of the training itself."""

    def __init__(self, name: str, workload: str, seed: int, num_steps: int) -> None:
        self._random = random.Random(f"{name}/{workload}/{seed}")
        self.num_steps = num_steps

    def between(self, low: float, high: float) -> float:
        return self._random.uniform(low, high)

    def magnitude(self, low: float, high: float) -> float:
        """A factor between two others, uniform in its logarithm."""
        return math.exp(self._random.uniform(math.log(low), math.log(high)))

    def onset(self) -> int:
        """The step at which the change begins."""
        return round(self.num_steps * self._random.uniform(EARLIEST_SHARE, LATEST_SHARE))

    def chosen(self, options: list[str]) -> str:
        return self._random.choice(options)

    @property
    def seed(self) -> int:
        return self._random.getrandbits(31)


class Change:
    """One change to a training script: a fault, a hard negative or a remedy.

    Each method is a place in the script. By default it changes nothing. `onset` is the first step that is different.
    """

    onset = 0

    def number(self, name: str, value: float) -> float:
        """A setting of the script, such as `lr`."""
        return value

    def model(self, model: nn.Module) -> None:
        """The model is built and initialized; the optimizer does not exist yet."""

    def optimizer(self, optimizer: Optimizer, model: nn.Module, session: Session) -> None:
        """An optimizer was made; the monitor does not exist yet."""

    def schedule(self, schedule: Schedule) -> None:
        """A learning-rate scheduler was made."""

    def watched(self, session: Session) -> None:
        """The monitor is attached, and training begins."""

    def pipeline(self, inputs: Tensor) -> Tensor:
        """Inputs on their way into the model, in training and in evaluation."""
        return inputs

    def order(self, order: Tensor, labels: Tensor) -> Tensor:
        """The order in which an epoch visits its samples, which have these labels."""
        return order

    def batch(self, step: int, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """A training batch. What it returns must not share memory with what it was given."""
        return inputs, targets

    def loss(self, step: int, loss: Tensor) -> Tensor:
        """The loss on which `backward` is called."""
        return loss

    def completed(self, step: int, session: Session) -> None:
        """The script has reported this step to the monitor."""
