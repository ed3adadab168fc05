"""forewarn as a contender: what it does on every step, at its default schedule, in full, and with all layers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from torch import Tensor

from forewarn.attach import watch
from forewarn.config import Config
from forewarn.judge.history import History
from forewarn.judge.judgement import Judge, Judgement
from forewarn.lab.bench.contender import MAX_NORM, Contender, Turn
from forewarn.lab.bench.workloads import Training
from forewarn.measure.schedule import Schedule
from forewarn.monitor import Monitor
from forewarn.types import Block

_MEASURED_BY = "gradient/norm"
"""A reading that only steps measured in detail have."""


class TimedJudge(Judge):
    """The monitor's judge with a clock: CPU time of the training thread, measured steps apart from the others."""

    def __init__(self, judge: Judge, seconds: dict[bool, list[float]]) -> None:
        super().__init__(judge.rule_set, judge.info)
        self._seconds = seconds
        self.depth = 0

    def __call__(self, step: int, history: History, blocks: Iterable[Block]) -> Judgement:
        blocks = list(blocks)
        begin = time.thread_time()
        judgement = super().__call__(step, history, blocks)
        spent = time.thread_time() - begin
        self._seconds[any(block.name == _MEASURED_BY for block in blocks)].append(spent)
        self.depth = step + 1
        return judgement


class Forewarn(Contender):
    """The monitor as `watch` makes it, recording to disk; each turn goes on with the run of the one before.

    A warning does not make it measure more here, so that every step is of the kind that it stands for.
    """

    def __init__(
        self, name: str, description: str, due: Callable[[Turn, int], bool], period: int = 1, *, inside: bool = True
    ) -> None:
        self.name, self.description, self.period = name, description, period
        self._due = due
        self._inside = inside
        """Whether it looks inside the model while the forward pass runs."""
        self._monitor: Monitor | None = None
        self.judging: dict[bool, list[float]] = {True: [], False: []}
        """Seconds of judging, by whether the step was measured in detail."""
        self.depth = 0
        """Steps that the rules could look back on."""
        self.backend = ""
        """What the tensors were read with, as the run records it."""

    def attach(self, training: Training, turn: Turn) -> None:
        super().attach(training, turn)
        monitor = watch(
            training.model,
            training.optimizer,
            turn.directory / "run",
            every=lambda step: self._due(turn, step % turn.num_steps),
            config=Config(escalation_steps=0, activations=self._inside, attention=self._inside),
            views=[],
            resume=True,
        )
        self.backend = monitor.info.versions.get("statistics", "torch")
        self._judge = TimedJudge(monitor._judge, self.judging)
        monitor._judge = self._judge
        self._monitor = monitor

    def clip(self) -> None:
        assert self._monitor is not None
        self._monitor.clip_grad_norm_(MAX_NORM)

    def after_step(self, loss: Tensor) -> None:
        assert self._monitor is not None
        self._monitor.step(loss)

    def settle(self) -> None:
        assert self._monitor is not None
        assert self._monitor._writer is not None
        self._monitor._writer.flush()

    def close(self) -> None:
        if self._monitor is not None:
            self._monitor.close()
            self.depth = self._judge.depth
            self._monitor = None


def tiers() -> list[Forewarn]:
    """The four ways to run forewarn, from the cheapest to the dearest."""
    every = Schedule().every
    return [
        Forewarn(
            "forewarn-every-step",
            "loss, learning rate, global gradient norm and step time, recorded and judged; no tensor in detail",
            lambda turn, step: False,
        ),
        Forewarn(
            "forewarn-default",
            f"the same, and on one step in {every} gradient, weight and update of every tensor, and every layer",
            lambda turn, step: turn.is_rare(step),
            period=every,
        ),
        Forewarn(
            "forewarn-full",
            "gradient, weight and update of every tensor on every step, recorded and judged",
            lambda turn, step: True,
            inside=False,
        ),
        Forewarn(
            "forewarn-activations",
            "the same, and on every step what every layer gives: activations, units, attention",
            lambda turn, step: True,
        ),
    ]
