"""A way to watch a training loop, and the loop that it is put into."""

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

from forewarn.lab.bench.workloads import Training, Workload

MAX_NORM = 1.0
"""Every contender clips, as most training loops do."""
WARM_UP_STEPS = 2
"""Steps of each turn before the timed ones: the optimizer makes its state, the contender its files."""
LEAST_CYCLE = 3
"""A timed step with rare work, the one after it, and one without."""


@dataclass(frozen=True, slots=True)
class Turn:
    """The steps that a contender runs in one go, with either of two new models, before the next contender does."""

    directory: Path
    """Where it may write; the same one in every turn."""
    cycle: int
    """The timed steps. What a contender does rarely it does once in so many: exactly one timed step has it."""

    @property
    def num_steps(self) -> int:
        return WARM_UP_STEPS + self.cycle

    def is_rare(self, step: int) -> bool:
        """Whether rare work is due at this step, counted from the first of the turn."""
        return step % self.cycle == 0

    def weights(self, period: int) -> list[float]:
        """What each timed step counts if in a real run rare work is due once in `period` steps.

        The step after a rare one counts as little: threads in the background finish there.
        """
        if period == 1:
            return [1.0] * self.cycle
        other = (period - 2) / (self.cycle - 2)
        timed = range(WARM_UP_STEPS, self.num_steps)
        return [1.0 if self.is_rare(step) or self.is_rare(step - 1) else other for step in timed]


class Contender:
    """The bare loop, which the others add to. Clipping is part of it."""

    name: str = "bare"
    description: str = "the loop alone"
    period: int = 1
    """Once in so many steps of a real run it does its rare work."""
    is_process_wide: ClassVar[bool] = False
    """Whether it reaches into loops that it was not attached to; the bare loop then runs before it, not beside it."""
    package: ClassVar[str | None] = None
    """What must be importable."""
    install: ClassVar[str] = ""
    """What pip calls it."""

    def attach(self, training: Training, turn: Turn) -> None:
        self.training = training

    def after_backward(self, loss: Tensor) -> None:
        """With fresh gradients, before they are clipped."""

    def clip(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.training.model.parameters(), MAX_NORM)

    def after_step(self, loss: Tensor) -> None:
        """After the optimizer step, with the gradients still there."""

    def settle(self) -> None:
        """After the warm-up: finish what is done once per run, such as a thread's opening of its files."""

    def close(self) -> None:
        """Take every hook back."""

    def missing(self) -> str | None:
        """Why it cannot take part, as a sentence with the pip line."""
        if self.package is None or importlib.util.find_spec(self.package) is not None:
            return None
        return f"not installed: pip install {self.install}"


class BareAgain(Contender):
    """A second bare loop: whatever is measured for it is what the method itself is off by."""

    name = "bare-again"
    description = "the loop alone, once more: the error of this benchmark"


class Loop:
    """A contender in a training loop, for one turn; what other packages print is kept off the terminal.

    The training is a fresh one unless one is given.
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
        """Make the next batch ready; no part of what is measured."""
        self._batch = self._training.make_batch()

    def settle(self) -> None:
        """Let what belongs to the start of a run be over."""
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
