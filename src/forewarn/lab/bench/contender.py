"""A contender is one way to monitor a training loop; this is its interface, and the loop it runs in."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from forewarn.lab.bench.measurements import AGAIN
from forewarn.lab.bench.workloads import Training, Workload

MAX_NORM = 1.0
"""Every contender clips, as most training loops do."""
WARM_UP_STEPS = 2
"""Steps of each turn before the timed ones, in which the optimizer creates its state and the contender its files."""
LEAST_CYCLE = 3
"""A timed step with rare work, the one after it, and one without."""


@dataclass(frozen=True, slots=True)
class Turn:
    """The steps that a contender trains before the next one takes over."""

    directory: Path
    """Where the contender may write; the same directory in every turn."""
    cycle: int
    """Number of timed steps. Exactly one of them does the contender's rare work."""

    @property
    def num_steps(self) -> int:
        return WARM_UP_STEPS + self.cycle

    def is_rare(self, step: int) -> bool:
        """Whether rare work is due at this step of the turn, counted from zero."""
        return step % self.cycle == 0

    def weights(self, period: int) -> list[float]:
        """Weights of the timed steps if a real run does the rare work once in `period` steps.

        The step after a rare one weighs as little, since background threads finish the rare work there.
        """
        if period == 1:
            return [1.0] * self.cycle
        usual = (period - 2) / (self.cycle - 2)
        timed = range(WARM_UP_STEPS, self.num_steps)
        return [1.0 if self.is_rare(step) or self.is_rare(step - 1) else usual for step in timed]


class Contender:
    """The bare loop, clipping included. Subclasses add monitoring to it."""

    name: str = "bare"
    description: str = "the loop alone"
    period: int = 1
    """A real run does the rare work once in this many steps."""
    is_process_wide: ClassVar[bool] = False
    """Whether it also affects other loops; the bare loop then runs before it instead of beside it."""
    package: ClassVar[str | None] = None
    """The module that must be importable."""
    install: ClassVar[str] = ""
    """Its name for pip."""

    def attach(self, training: Training, turn: Turn) -> None:
        self.training = training

    def after_backward(self, loss: Tensor) -> None:
        """Called with fresh gradients, before they are clipped."""

    def clip(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.training.model.parameters(), MAX_NORM)

    def after_step(self, loss: Tensor) -> None:
        """Called after the optimizer step, before the gradients are cleared."""

    def settle(self) -> None:
        """Called after the warm-up: wait for work done once per run, such as a thread opening its files."""

    def close(self) -> None:
        """Remove every hook."""

    def missing(self) -> str | None:
        """Why it cannot take part, with the pip command that helps; None if it can."""
        if self.package is None or importlib.util.find_spec(self.package) is not None:
            return None
        return f"not installed: pip install {self.install}"


class BareAgain(Contender):
    """A second bare loop: the cost measured for it is the error of the method."""

    name = AGAIN
    description = "the loop alone again: the error of this benchmark"


class Loop:
    """A training loop with a contender in it, for one turn. The output of third-party packages is discarded.

    Builds a new model unless `training` is given.
    """

    def __init__(self, workload: Workload, contender: Contender, turn: Turn, training: Training | None = None) -> None:
        self._workload, self._contender, self._turn = workload, contender, turn
        self._given = training
        self._batch: Any = None
        self._quiet = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._turn.directory.mkdir(parents=True, exist_ok=True)
        self._training = self._workload.build() if self._given is None else self._given
        if self._contender.package is not None:
            self._quiet.enter_context(_silence())
        try:
            self._contender.attach(self._training, self._turn)
        except BaseException:
            self._quiet.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._quiet:
            self._contender.close()
        del self._training, self._contender.training, self._batch

    def fetch(self) -> None:
        """Prepare the next batch, outside of what is measured."""
        self._batch = self._training.make_batch()

    def settle(self) -> None:
        """Wait until the contender has finished its start-up work."""
        self._contender.settle()

    def step(self) -> None:
        """One step of training."""
        training, contender = self._training, self._contender
        loss = training.loss(training.model, self._batch)
        loss.backward()
        contender.after_backward(loss)
        contender.clip()
        training.optimizer.step()
        contender.after_step(loss)
        training.optimizer.zero_grad()


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    with (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield
