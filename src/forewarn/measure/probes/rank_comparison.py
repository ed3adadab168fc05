"""What tells one rank from the others: its loss, its time, and parameters that should be the same on all."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from torch import nn
from torch.optim import Optimizer

from forewarn.measure.engine import UpdateSampler
from forewarn.measure.forward import received
from forewarn.measure.over_ranks import How, Part
from forewarn.measure.parameters import ParameterIndex
from forewarn.measure.probe import ONE, Array, Pending, Probe, Reading
from forewarn.measure.shards import local_part
from forewarn.measure.step import Step

_FEW_RANKS = 16
"""Maximum number of ranks whose losses are recorded on every step."""

_COMPARED = 64
"""Number of values compared per parameter."""

_PHASES = ("step", "data", "forward", "update")


class RanksProbe(Probe):
    """`rank/…`: the loss of every rank on every step; times and differing copies of parameters on measured ones.

    Under DDP every step takes as long on all ranks, since the fast ones wait for the slowest in the backward pass. So
    the times before and after it are compared. Parameters that differ on the first measured step are meant to, such as
    experts; they are not compared.
    """

    name = "ranks"
    on_every_rank = True

    def __init__(self, parameter_index: ParameterIndex) -> None:
        self._parameter_index = parameter_index
        self._times: dict[str, float] = {}
        self._sampler: tuple[tuple[str, ...], UpdateSampler] = ((), UpdateSampler((), _COMPARED))
        self._apart_at_first: set[str] | None = None
        self._is_fed = False
        """Whether an input of this step came from another rank, as in a pipeline."""

    def step_begins(self) -> None:
        self._is_fed = False
        self._times = {"begin": time.perf_counter()}

    def forward_begins(self) -> None:
        self._times.setdefault("forward", time.perf_counter())

    def inputs_given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._is_fed |= bool(received([args, kwargs]))

    def needs_every_backward(self) -> bool:
        return False

    def backward_begins(self, step: Step) -> None:
        self._times.setdefault("backward", time.perf_counter())

    def before_update(self, index: int, optimizer: Optimizer, step: Step, closure: bool) -> None:
        self._times["update"] = time.perf_counter()

    def collect(self, step: Step) -> Pending | None:
        times, self._times = self._times, {}
        step.first_rank, step.is_fed = self._parameter_index.first_rank, self._is_fed
        if not step.measured:
            return Pending(decode=lambda _: self._losses(step))
        now = time.perf_counter()
        begin, update = times.get("begin", now), times.get("update", now)
        forward = times.get("forward", begin)
        backward = times.get("backward", forward)
        seconds = np.array([now - begin, forward - begin, backward - forward, now - update])
        names, marks = self._marks()

        def decode(arrays: Sequence[Array]) -> Iterator[Reading]:
            yield from self._losses(step)
            by_rank = arrays[0].reshape(-1, len(_PHASES))
            if len(by_rank) == len(step.ranks):
                for phase, column in zip(_PHASES, by_rank.T, strict=True):
                    yield Reading(f"rank/{phase}_seconds", _ranks(step), column)
                yield from self._differences(step, names, *arrays[1:])

        parts = [Part(How.EACH, "seconds"), Part(How.MIN, "marks", each=True), Part(How.MAX, "marks")]
        return Pending([seconds, marks, marks], decode, parts)

    def _losses(self, step: Step) -> Iterator[Reading]:
        losses = step.each_rank.get("loss", ())
        if len(losses) and (step.measured or len(losses) <= _FEW_RANKS):
            yield Reading("rank/loss", _ranks(step), losses)

    def _marks(self) -> tuple[tuple[str, ...], Any]:
        """The parameters that all ranks hold whole, and a checksum of a sample of each."""
        shards = self._parameter_index.shards
        copies: dict[str, nn.Parameter] = {}
        if shards is not None:
            held = zip(self._parameter_index.names, self._parameter_index.parameters, shards.of, strict=True)
            copies = {name: parameter for name, parameter, shard in held if not shard.is_divided}
        names = tuple(copies)
        if self._sampler[0] != names:
            self._sampler = (names, UpdateSampler(names, _COMPARED))
        parts = [part for parameter in copies.values() if (part := local_part(parameter)) is not None]
        if len(parts) < len(names):
            return (), np.zeros(0)
        return names, self._sampler[1].marks(parts)

    def _differences(self, step: Step, names: tuple[str, ...], least: Array, most: Array) -> Iterator[Reading]:
        apart = [name for name, differs in zip(names, least != most, strict=True) if differs]
        if self._apart_at_first is None:
            self._apart_at_first = set(apart)
        apart = [name for name in apart if name not in self._apart_at_first]
        total = step.with_other_stages("rank/desynced_tensors", np.array([len(apart)])).sum()
        yield Reading("rank/desynced_tensors", ONE, total)
        if apart and "marks" in step.each_rank:
            odd = _odd_one(step.each_rank["marks"])
            yield Reading("rank/desync", (apart[0],), float(step.ranks[odd] if odd >= 0 else -1))

    def state_dict(self) -> dict[str, Any]:
        return {"apart_at_first": None if self._apart_at_first is None else sorted(self._apart_at_first)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        apart = state["apart_at_first"]
        self._apart_at_first = None if apart is None else set(apart)


def _ranks(step: Step) -> tuple[str, ...]:
    return tuple(f"rank_{rank}" for rank in step.ranks)


def _odd_one(marks: Array) -> int:
    """The rank whose checksum is unlike that of all others; -1 if there is no such rank, as with two."""
    counts = Counter(marks.tolist())
    single = [rank for rank, mark in enumerate(marks.tolist()) if counts[mark] == 1]
    return single[0] if len(single) == 1 and len(counts) == 2 else -1
