"""The tiers of forewarn, from cheap readings on every step to every tensor and layer, and the bare loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from torch import Tensor

from forewarn.attach import watch
from forewarn.config import Config
from forewarn.judge.history import History
from forewarn.judge.judgement import Judge, Judgement
from forewarn.lab.bench.contender import MAX_NORM, BareAgain, Contender, Turn
from forewarn.lab.bench.workloads import Training
from forewarn.measure.options import Measure
from forewarn.measure.schedule import Schedule
from forewarn.monitor import Monitor
from forewarn.types import Block

_MEASURED_BY = "gradient/norm"
"""A metric that only steps measured in detail record."""


class TimedJudge(Judge):
    """The monitor's judge with a clock: CPU time of the training thread, separately for measured steps."""

    def __init__(self, judge: Judge, seconds: dict[bool, list[float]]) -> None:
        super().__init__(judge.rule_set, judge.info)
        self._seconds = seconds
        self.depth = 0

    def __call__(self, step: int, history: History, blocks: Iterable[Block]) -> Judgement:
        blocks = blocks if isinstance(blocks, Sequence) else list(blocks)
        begin = time.thread_time()
        judgement = super().__call__(step, history, blocks)
        spent = time.thread_time() - begin
        self._seconds[any(block.name == _MEASURED_BY for block in blocks)].append(spent)
        self.depth = step + 1
        return judgement


class Forewarn(Contender):
    """The monitor as `watch` makes it, recording to disk. Each turn resumes the run of the previous one.

    Warnings do not trigger extra measurements here, so that every step does the work of its tier and no more.
    """

    def __init__(
        self,
        name: str,
        description: str,
        due: Callable[[Turn, int], bool],
        period: int = 1,
        *,
        measure: Measure | None = None,
    ) -> None:
        self.name, self.description, self.period = name, description, period
        self._due = due
        self.measure = measure or Measure()
        self._monitor: Monitor | None = None
        self.judging: dict[bool, list[float]] = {True: [], False: []}
        """Seconds of judging, by whether the step was measured in detail."""
        self.depth = 0
        """Steps of history that the rules could use."""
        self.backend = ""
        """The statistics backend, as the run records it."""

    def attach(self, training: Training, turn: Turn) -> None:
        super().attach(training, turn)
        monitor = watch(
            training.model,
            training.optimizer,
            turn.directory / "run",
            every=lambda step: self._due(turn, step % turn.num_steps),
            config=Config(escalation_steps=0, measure=self.measure),
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
    """Four ways to run forewarn, the cheapest first."""
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
            measure=Measure(activations=False, attention=False),
        ),
        Forewarn(
            "forewarn-activations",
            "the same, and every layer's output on every step: activations, units, attention",
            lambda turn, step: True,
        ),
    ]


def own_contenders() -> list[Contender]:
    """What `forewarn bench` compares: the bare loop, the bare loop once more, and every tier."""
    return [Contender(), BareAgain(), *tiers()]
