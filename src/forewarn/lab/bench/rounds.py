"""The benchmark of one workload: every contender takes a turn per round; results are medians over rounds."""

from __future__ import annotations

import contextlib
import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import TypeVar

from forewarn.lab.bench.contender import LEAST_CYCLE, Contender, Turn
from forewarn.lab.bench.counting import Counted, held_bytes, operations
from forewarn.lab.bench.measurements import Absent, Cost, Judging, Spread, Visits, WorkloadResult
from forewarn.lab.bench.tiers import Forewarn
from forewarn.lab.bench.timing import Pair, timed_turn, visits
from forewarn.lab.bench.workloads import Workload
from forewarn.measure.options import Measure

Tell = Callable[[str], None]
"""Called before each turn with a description of it."""

T = TypeVar("T")

LEAST_TURN_SECONDS, MOST_STEPS = 0.3, 150
"""A turn of a fast workload has more timed steps than asked for: as many as take this long, but no more than this."""

LEAST_ROUNDS = 2
"""Rounds that are taken even if time runs out: fewer have no spread."""

_PASSES_THAT_COUNT = 2
"""Operations, and memory."""


def num_turns(contenders: Sequence[Contender], rounds: int) -> int:
    """Number of turns that `benchmark` reports, if no contender drops out."""
    present = [contender for contender in contenders if contender.missing() is None]
    return len(present) * (rounds + _PASSES_THAT_COUNT)


def benchmark(
    workload: Workload,
    contenders: Sequence[Contender],
    *,
    rounds: int,
    steps: int,
    directory: Path,
    tell: Tell,
    seconds: float = math.inf,
) -> WorkloadResult:
    """What each contender adds to a step of this workload; the first contender is the bare loop.

    In every round each contender trains the same `steps` steps of a new model, and the order rotates by one. A
    contender that is not installed or raises is left out, and the result says why. No further round is begun if it
    would end after this many seconds, but two are always taken. Raises ValueError if the workload does not train.
    """
    with past_set_aside():
        return _benchmark(workload, contenders, rounds, steps, directory, tell, seconds)


@contextlib.contextmanager
def past_set_aside() -> Iterator[None]:
    """Exempt existing objects from garbage collection: its long pauses would hit some turns and not others."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _benchmark(
    workload: Workload,
    contenders: Sequence[Contender],
    rounds: int,
    steps: int,
    directory: Path,
    tell: Tell,
    seconds: float,
) -> WorkloadResult:
    begin = time.monotonic()
    bare = contenders[0]
    steps = enough_steps(workload, steps, directory)
    standing = _Standing(workload, steps, directory, tuple(contenders))
    optimizer, sizes = _shape(workload)
    visited: list[Visits] = []
    for number in range(rounds):
        # Counting operations and bytes afterwards takes about as long as a round.
        if number >= LEAST_ROUNDS and (time.monotonic() - begin) * (number + 2) / number > seconds:
            rounds = number
            break
        for contender in _rotated(standing.running, number):
            tell(f"{workload.name}, round {number + 1} of {rounds}: {contender.name}")
            standing.attempt(contender, "timed", timed_turn, standing.pairs)
        visited.append(visits(sizes))
    judging = _judging(contenders)
    for contender in tuple(standing.running):
        tell(f"{workload.name}, counting operations: {contender.name}")
        standing.attempt(contender, "counted", operations, standing.counted)
    for contender in tuple(standing.running):
        tell(f"{workload.name}, counting bytes: {contender.name}")
        standing.attempt(contender, "held", held_bytes, standing.held)
    typical = Visits(*(statistics.median(times) for times in zip(*map(astuple, visited), strict=True)))
    alone = standing.counted[bare.name][0]
    return WorkloadResult(
        workload.name,
        workload.description,
        num_parameters=sum(sizes),
        num_tensors=len(sizes),
        optimizer=optimizer,
        rounds=rounds,
        steps=steps,
        bare_seconds=Spread.of([pair.alone for pairs in standing.pairs.values() for pair in pairs]),
        bare_operations=alone.operations,
        bare_syncs=alone.syncs,
        visits=typical,
        backend=next((contender.backend for contender in contenders if isinstance(contender, Forewarn)), ""),
        costs=tuple(standing.cost(contender, bare, typical.read) for contender in standing.running),
        judging=judging,
        absent=tuple(standing.absent),
    )


def enough_steps(workload: Workload, steps: int, directory: Path) -> int:
    """As many timed steps that a turn takes a while: those of a small model are too short to time a few of them."""
    try:
        seconds = timed_turn(workload, Contender(), Turn(directory / "bare", LEAST_CYCLE)).alone
    except Exception as error:
        raise ValueError(f"the workload {workload.name} does not train: {type(error).__name__}: {error}") from error
    return max(steps, min(MOST_STEPS, int(LEAST_TURN_SECONDS / max(seconds, 1e-6))))


def _shape(workload: Workload) -> tuple[str, list[int]]:
    """The name of the optimizer and the sizes of all tensors."""
    training = workload.build()
    return type(training.optimizer).__name__, [parameter.numel() for parameter in training.model.parameters()]


def _rotated(contenders: Sequence[Contender], by: int) -> list[Contender]:
    by %= len(contenders)
    return [*contenders[by:], *contenders[:by]]


@dataclass
class _Standing:
    """The contenders still running, and the measurements of each so far."""

    workload: Workload
    steps: int
    directory: Path
    contenders: tuple[Contender, ...]
    running: list[Contender] = field(default_factory=list)
    absent: list[Absent] = field(default_factory=list)
    pairs: dict[str, list[Pair]] = field(default_factory=dict)
    """By contender, one for each round."""
    counted: dict[str, list[Counted]] = field(default_factory=dict)
    held: dict[str, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for contender in self.contenders:
            reason = contender.missing()
            if reason is None:
                self.running.append(contender)
            else:
                self.absent.append(Absent(contender.name, contender.description, reason))

    def attempt(
        self,
        contender: Contender,
        folder: str,
        call: Callable[[Workload, Contender, Turn], T],
        measurements: dict[str, list[T]],
    ) -> None:
        """Run a turn and keep its measurement. A contender that raises drops out; the bare loop must not raise."""
        turn = Turn(self.directory / self.workload.name.replace(":", "-") / contender.name / folder, self.steps)
        try:
            measurements.setdefault(contender.name, []).append(call(self.workload, contender, turn))
        except Exception as error:
            if contender is self.contenders[0]:
                cause = f"{type(error).__name__}: {error}"
                raise ValueError(f"the workload {self.workload.name} does not train: {cause}") from error
            self.running.remove(contender)
            reason = f"failed: {type(error).__name__}: {error}"
            self.absent.append(Absent(contender.name, contender.description, reason))

    def cost(self, contender: Contender, bare: Contender, read: float) -> Cost:
        pairs = self.pairs[contender.name]
        added = Spread.of([pair.added for pair in pairs])
        counted, alone = self.counted[contender.name][0], self.counted[bare.name][0]
        return Cost(
            contender.name,
            contender.description,
            added_share=Spread.of([pair.added / pair.alone for pair in pairs]),
            added_seconds=added,
            reads=added.median / read,
            operations=counted.operations - alone.operations,
            syncs=counted.syncs - alone.syncs,
            held_bytes=self.held[contender.name][0] - self.held[bare.name][0],
        )


def _judging(contenders: Sequence[Contender]) -> Judging | None:
    """Judging time of the tiers that measure everything, over the later half of the steps: rules look back."""
    used = [tier for tier in contenders if isinstance(tier, Forewarn) and tier.depth and tier.measure == Measure()]
    if not used:
        return None
    by_kind = {
        kind: [seconds for tier in used for seconds in tier.judging[kind][len(tier.judging[kind]) // 2 :]]
        for kind in (True, False)
    }
    spreads = {kind: Spread.of(times) if times else None for kind, times in by_kind.items()}
    return Judging(spreads[True], spreads[False], depth=max(tier.depth for tier in used))
