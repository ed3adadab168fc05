"""Pipeline stages: ranks that train different parts of one model, whose readings become those of one run."""

from __future__ import annotations

import json
import math
import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from forewarn.catalogue import Catalogue, Scope
from forewarn.codec import Noun
from forewarn.histograms import NUM_BINS
from forewarn.measure.over_ranks import Array
from forewarn.measure.parameters import ParameterIndex
from forewarn.measure.pipelining import stages_that_run
from forewarn.measure.probe import ONE, Histograms, Reading
from forewarn.measure.recording import Collected
from forewarn.measure.shards import ranks_together
from forewarn.measure.step import Step
from forewarn.types import Reason, RunInfo

_OF_THE_MODEL = (Scope.PARAMETER, Scope.MODULE, Scope.HEAD, Scope.BLOCK, Scope.EXPERT)
"""Scopes that begin with the name of a module."""

_OF_THE_RECORDER = ("monitor", "speed", "system")
"""Families of which only the values of the recording rank count; some are computed from those of all stages there."""

_OF_THE_OUTPUT = {
    "activation/log_z", "activation/probability_rows", "activation/reversed_rows", "activation/row_cosine",
    "activation/effective_rank", "batch/num_targets", "batch/num_classes", "batch/middle_class",
}  # fmt: skip
"""What is read at the end of the model: elsewhere, only the last stage has it."""

_OF_THE_INPUT = {"batch/input_mean", "batch/input_rms", "batch/repeated"}
"""What is read at the beginning of the model: only the first stage has it."""

_STAGE_PREFIX = re.compile(r"^stage\d+\.")

_UNLIKE = {"rank/data_seconds", "rank/forward_seconds", "rank/update_seconds"}
"""Times that differ between stages whatever they do, since each waits for the one before and after it."""


@dataclass(frozen=True, slots=True)
class Role(Noun):
    """What a rank says about the model that it watches, by which the stages of a pipeline are recognized."""

    names: int = 0
    """A checksum of the names of its parameters."""
    copy: int = 0
    """Equal on ranks that hold the same parameters: by their process groups, or else by some values."""
    stages: tuple[int, ...] = ()
    """The numbers of its stages, if torch's own pipelining runs them."""
    num_stages: int = 0
    is_fed: bool = False
    """Whether an input requires a gradient but comes from no operation here."""
    has_loss: bool = False


_watched: Counter[str] = Counter()
"""By kind, the number of models watched so far in this process that may be stages."""


class Candidate:
    """A model that may be a stage of a pipeline: its wrappers and shards do not connect it with all ranks."""

    def __init__(
        self,
        index: ParameterIndex,
        info: RunInfo,
        catalogue: Catalogue,
        read: Callable[[Collected, Sequence[Array]], list[Reading | Histograms]],
        settle: Callable[[bool], None],
    ) -> None:
        """`read` decodes a step, in any thread; `settle` is told whether this rank leads its stage."""
        self.info, self.catalogue, self.read = info, catalogue, read
        self._index, self._settle = index, settle
        self._together = ranks_together(index.called, index.parameters)
        assert index.rank is not None
        index.belong_to(min(self._together, default=index.rank))  # until it has met the others
        self._numbers, self._num_stages = stages_that_run(index.called)
        kind = f"stages {self._num_stages}" if self._num_stages else "parts"
        _watched[kind] += 1
        self.meeting = f"{kind} {_watched[kind]}"
        """The name under which the stages of a pipeline meet."""

    @property
    def is_sure(self) -> bool:
        """Whether it is a stage, of torch's own pipelining."""
        return self._num_stages > 1

    def role(self, step: Collected | None) -> Role:
        """What this rank says about itself, after its first step; None if it is asked before that."""
        names = zlib.crc32("\n".join(self.info.parameters).encode(errors="replace"))
        if self.is_sure or step is None:
            return Role(names, 0, self._numbers, self._num_stages)
        group = zlib.crc32(repr(sorted(self._together)).encode())
        has_loss = any(probe.name == "loss" and pending.tensors for probe, pending in step.pending)
        copy = group if self._together else self._index.checksum()
        return Role(names, copy, is_fed=step.context.is_fed, has_loss=has_loss)

    def belongs_to(self, first_rank: int) -> None:
        """The ranks have met: they know the first of those that hold this model or stage."""
        self._index.belong_to(first_rank)
        self._settle(self._index.leads)


def stages_of(roles: Sequence[Role]) -> tuple[tuple[int, ...], ...]:
    """The ranks of each stage, first to last; empty if these ranks do not train the stages of one pipeline.

    Torch's own stages have numbers. Others are recognized by their edges: the first stage has an input of its own and
    no loss, the last has a loss and, like all but the first, an input for which another rank wants the gradient.
    Models that have nothing to do with each other have a loss each.
    """
    ranks: defaultdict[tuple[Any, ...], list[int]] = defaultdict(list)
    if any(role.num_stages for role in roles):
        for rank, role in enumerate(roles):
            ranks[role.stages].append(rank)
        numbers = sorted(number for stages in ranks for number in stages)
        is_whole = all(numbers == list(range(role.num_stages)) for role in roles)
        return tuple(tuple(ranks[stages]) for stages in sorted(ranks)) if is_whole and len(ranks) > 1 else ()
    beginning = [role for role in roles if not role.is_fed]
    end = [role for role in roles if role.has_loss]
    if not beginning or not end or any(role.has_loss for role in beginning):
        return ()
    if any(len({role.names for role in edge}) > 1 for edge in (beginning, end)):
        return ()
    for rank, role in enumerate(roles):
        ranks[role.is_fed, role.has_loss, role.names, role.copy].append(rank)
    return tuple(sorted(map(tuple, ranks.values()), key=lambda of_stage: _place(roles, of_stage)))


def _place(roles: Sequence[Role], ranks: Sequence[int]) -> tuple[bool, bool, int]:
    return roles[ranks[0]].is_fed, roles[ranks[0]].has_loss, ranks[0]


class Stages:
    """The stages of a pipeline as one model: the names of its parts, and its optimizer groups.

    If a name occurs in two stages, all names begin with their stage: `stage1.0.weight`.
    """

    def __init__(self, ranks: Sequence[Sequence[int]], infos: Sequence[RunInfo], catalogue: Catalogue) -> None:
        self._infos = infos
        self._catalogue = catalogue
        self.in_order_of_ranks = sorted(range(len(ranks)), key=lambda stage: ranks[stage][0])
        """The numbers of the stages."""
        self.recorder = self.in_order_of_ranks[0]
        """The number of the stage of rank 0."""
        names = Counter(name for info in infos for name in {*info.parameters, *info.modules})
        self._are_ambiguous = any(count > 1 for count in names.values())
        self.num = len(ranks)
        groups = infos[self.recorder].groups
        self.groups = list(groups)
        self._first_group: list[int] = []
        """Of each stage: the number of its first optimizer group; groups that are set alike count as one."""
        for info in infos:
            is_alike = info.groups == groups
            self._first_group.append(0 if is_alike else len(self.groups))
            self.groups += () if is_alike else info.groups
        self.info = self._joined_info()
        """What is fixed about the whole model."""

    def _joined_info(self) -> RunInfo:
        parameters = {
            self._name(stage, name): replace(
                one, group=None if one.group is None else one.group + self._first_group[stage]
            )
            for stage, info in enumerate(self._infos)
            for name, one in info.parameters.items()
        }
        return replace(
            self._infos[self.recorder],
            model=" + ".join(dict.fromkeys(info.model for info in self._infos)),
            num_parameters=sum(info.num_parameters for info in self._infos),
            parameters=parameters,
            modules={
                self._name(stage, name): kind
                for stage, info in enumerate(self._infos)
                for name, kind in info.modules.items()
            },
            blocks=tuple(self._name(stage, name) for stage, info in enumerate(self._infos) for name in info.blocks),
            groups=tuple(self.groups),
        )

    def named(self, stage: int, reading: Reading | Histograms) -> Reading | Histograms | None:
        """A reading of a stage as one of the run; None if it says nothing about the run."""
        name, scopes = reading.name, reading.scopes
        if not self.tells(stage, name):
            return None
        metric = self._catalogue.find(name)
        kind = None if metric is None else metric.scope
        if kind is Scope.GROUP:
            if stage != self.recorder and not self._first_group[stage]:
                return None
            scopes = tuple(str(int(scope) + self._first_group[stage]) for scope in scopes)
        elif kind in _OF_THE_MODEL:
            scopes = tuple(self._name(stage, scope) for scope in scopes)
        elif kind is Scope.OPTIMIZER:
            scopes = tuple(f"stage{stage}.{scope}" for scope in scopes)
        return reading if scopes is reading.scopes else reading._replace(scopes=scopes)

    def tells(self, stage: int, metric: str) -> bool:
        """Whether a stage's readings of this metric count for the run."""
        if metric in _OF_THE_OUTPUT:
            return stage == self.num - 1
        if metric in _OF_THE_INPUT:
            return stage == 0
        if metric in _UNLIKE:
            return False
        if stage == self.recorder:
            return True
        is_of_a_part = "/" in metric and not self.is_of_the_whole(metric)
        return is_of_a_part and metric.partition("/")[0] not in _OF_THE_RECORDER

    def is_of_the_whole(self, metric: str) -> bool:
        """Whether a metric describes all tensors or blocks together."""
        declared = self._catalogue.find(metric)
        return declared is not None and declared.scope is Scope.MODEL

    def _name(self, stage: int, name: str) -> str:
        return f"stage{stage}.{name}" if self._are_ambiguous else name


def without_stage(name: str) -> str:
    """The name of a parameter as its own stage knows it."""
    return _STAGE_PREFIX.sub("", name)


@dataclass(frozen=True, slots=True)
class OtherStages:
    """What the other stages have read on one step."""

    stages: Stages
    readings: Sequence[tuple[int, Reading | Histograms]] = ()
    """Each with the number of its stage."""
    reasons: Mapping[str, Reason] = field(default_factory=dict)
    """By metric, why a stage has no reading of it."""

    @classmethod
    def of(cls, stages: Stages, texts: Sequence[bytes]) -> OtherStages:
        """From what the first rank of every stage has encoded, in the order of the ranks; empty for the recorder."""
        readings: list[tuple[int, Reading | Histograms]] = []
        reasons: dict[str, Reason] = {}
        for stage, text in zip(stages.in_order_of_ranks, texts, strict=True):
            if text:
                of_stage, missing = decoded(text)
                readings += [(stage, reading) for reading in of_stage]
                reasons |= {metric: reason for metric, reason in missing.items() if stages.tells(stage, metric)}
        return cls(stages, readings, reasons)

    def values(self, metric: str) -> Array:
        """The values of a metric, of all scopes and stages."""
        named = [
            reading.values for _, reading in self.readings if reading.name == metric and isinstance(reading, Reading)
        ]
        return np.concatenate([np.zeros(0), *(np.asarray(values, np.float64).ravel() for values in named)])

    def norm(self, metric: str, own: float) -> float:
        """The norm over all stages. If all of them give the same number, it is that of the whole already."""
        values = [own, *self.values(metric).tolist()]
        if len(values) < self.stages.num:
            return math.nan
        return own if len(set(values)) == 1 else math.sqrt(math.fsum(value * value for value in values))

    def _lacks(self, reading: Reading | Histograms) -> bool:
        """Whether a reading of the recording rank about the whole model lacks what other stages did not send."""
        if not self.stages.is_of_the_whole(reading.name) or isinstance(reading, Histograms):
            return False
        if not self.readings:
            return True
        is_missing = bool(np.isnan(np.asarray(reading.values, np.float64)).all())
        return is_missing and len(self.values(reading.name)) < self.stages.num - 1

    def joined(self, own: Iterable[Reading | Histograms]) -> Iterator[Reading | Histograms]:
        """The readings of all stages. Of the run as a whole, what the recording rank has read counts."""
        recorder = self.stages.recorder
        taken: set[tuple[str, str]] = set()
        histograms: dict[str, list[Histograms]] = {}
        of_recorder = ((recorder, reading) for reading in own if not self._lacks(reading))
        for stage, reading in [*of_recorder, *self.readings]:
            named = self.stages.named(stage, reading)
            if isinstance(named, Histograms):
                histograms.setdefault(named.name, []).append(named)
            elif named is not None and stage == recorder:
                taken.update((named.name, scope) for scope in named.scopes)
                yield named
            elif named is not None:
                new = [place for place, scope in enumerate(named.scopes) if (named.name, scope) not in taken]
                taken.update((named.name, scope) for scope in named.scopes)
                scopes = tuple(named.scopes[place] for place in new)
                yield Reading(named.name, scopes, np.asarray(named.values, np.float64).ravel()[new])
        for name, parts in histograms.items():
            scopes = tuple(scope for part in parts for scope in part.scopes)
            counts, zeros = (np.concatenate([getattr(part, what) for part in parts]) for what in ("counts", "zeros"))
            yield Histograms(name, scopes, counts, zeros)


def encoded(readings: Sequence[Reading | Histograms], step: Step) -> bytes:
    """The readings of a step as bytes, and what else it has to say to the stage that records."""
    reasons, notes = step.reasons, step.for_other_stages
    readings = [*readings, *(Reading(name, ONE, value) for name, value in notes.items())]
    scopes: dict[tuple[str, ...], int] = {}
    head = []
    values = [np.zeros(0)]
    for reading in readings:
        number = scopes.setdefault(reading.scopes, len(scopes))
        head.append([reading.name, number, isinstance(reading, Histograms)])
        parts = [reading.counts, reading.zeros] if isinstance(reading, Histograms) else [reading.values]
        values += [np.asarray(part, np.float64).ravel() for part in parts]
    text = json.dumps(
        {"scopes": list(scopes), "readings": head, "reasons": {name: int(why) for name, why in reasons.items()}}
    )
    return text.encode() + b"\n" + np.concatenate(values).tobytes()


def decoded(content: bytes) -> tuple[list[Reading | Histograms], dict[str, Reason]]:
    """The inverse of `encoded`."""
    text, _, numbers = content.partition(b"\n")
    head = json.loads(text)
    scopes = [tuple(names) for names in head["scopes"]]
    values = np.frombuffer(numbers, np.float64)
    readings: list[Reading | Histograms] = []
    for name, number, is_histogram in head["readings"]:
        count = len(scopes[number])
        if is_histogram:
            size = count * 2 * NUM_BINS
            counts, zeros, values = values[:size], values[size : size + count], values[size + count :]
            shaped = counts.reshape(count, 2, NUM_BINS).astype(np.int64)
            readings.append(Histograms(name, scopes[number], shaped, zeros.astype(np.int64)))
        else:
            readings.append(Reading(name, scopes[number], values[:count]))
            values = values[count:]
    return readings, {name: Reason(why) for name, why in head["reasons"].items()}
