"""Combines the readings of all ranks in a background thread, one step late; the training never waits for it."""

from __future__ import annotations

import json
import logging
import math
import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Protocol

import numpy as np

from forewarn.measure.neighbors import Neighbors, machine
from forewarn.measure.over_ranks import (
    OWN,
    Array,
    Entry,
    How,
    Layout,
    Part,
    key_of,
    pack,
    summary,
    unpack,
)
from forewarn.measure.peers import Accepts, Exit, Peers
from forewarn.measure.probe import Pending, Probe
from forewarn.measure.recording import Collected
from forewarn.measure.shards import Shards
from forewarn.measure.stages import Candidate, OtherStages, Role, Stages, encoded, stages_of
from forewarn.types import Reason, RunInfo

_log = logging.getLogger("forewarn")

_STEPS_BEHIND, _SECONDS_BEHIND = 20, 10.0
"""The other ranks count as gone if they are behind by this many steps and by this long.

A rank that only waits for another, which evaluates or saves a checkpoint, makes no steps."""

_SECONDS_AT_THE_END = 10.0
"""How long to wait for other ranks once the training is over."""

_SECONDS_AFTER_ERROR = 0.5
"""The same if it ended with an error."""

_SECONDS_FOR_LAST = 2.0
"""How long to wait for the last message at a checkpoint, and until other ranks no longer need the connection."""

_SECONDS_TO_AGREE = 60.0
"""How long to wait for other ranks at a step on which all of them may act."""

NEVER_MET = "not every rank is watched"
_ENDED = "the run has ended"

_STEPS_AHEAD = 5
"""Steps from a message to the step on which all ranks follow it: by then all of them have received it."""

_MAX_RIDING = 32
"""Maximum count of numbers that travel within the first message of a step."""

_MAX_LAYOUTS = 256
"""Combinations of layouts that are remembered."""

_EACH = "each "
"""At the start of the key of what each rank says about its own array."""

_CLOSED = -1.0
"""In place of a step: this rank has closed its monitor."""


_QUESTION = -2.0
"""In place of a step, minus the step: all ranks ask what rank 0 says."""


class _Word(IntEnum):
    """The numbers at the start of the first message."""

    STEP = 0
    MARK = 1
    LENGTH = 2
    DENSE_FROM = 3
    DENSE_UNTIL = 4
    WANTS_STOP = 5
    KNOWS_OF_STOP = 6
    INTERVAL_FROM = 7
    INTERVAL = 8
    WANTS_ACTION = 9
    KNOWS_OF_ACTION = 10


_WISHES = [_Word.WANTS_STOP, _Word.KNOWS_OF_STOP, _Word.WANTS_ACTION, _Word.KNOWS_OF_ACTION]


class Log(Protocol):
    """What a rank leaves behind if the run crashes."""

    def begin(self, directory: Path, num_ranks: int) -> None: ...

    def completed(self, step: int) -> None: ...

    def saw_end(self, ranks: Sequence[int]) -> None: ...

    def close(self, reason: str) -> None: ...


@dataclass(slots=True)
class _Parcel:
    """The readings of one step on their way through the exchange."""

    content: tuple[Collected, list[Array]]
    is_exchanged: bool
    """False for values that only this rank has; they keep their place in the order."""
    word: Array = field(default_factory=lambda: np.zeros(len(_Word)))
    is_combined: bool = False
    stops: bool = False
    """Whether all ranks agreed, with this step, to stop."""
    acts: bool = False
    """Whether all ranks agreed to act after this step."""
    sent: float = field(default_factory=time.monotonic)
    done: threading.Event = field(default_factory=threading.Event)


@dataclass(slots=True)
class _Question:
    """What all ranks ask rank 0 at the same step."""

    step: int
    text: bytes = b""
    answers: list[bytes] | None = None
    """What each rank says."""
    numbers: Array | None = None
    """In place of a text, numbers to add up over the ranks that hold this model or stage."""
    total: Array | None = None
    """Their sum; None if the ranks have given different counts of numbers."""
    done: threading.Event = field(default_factory=threading.Event)


class Exchange:
    """Takes the arrays of each step, and returns them combined over all ranks, in order.

    Every step has one small message from each rank to all; measured steps have two more, of sums and of maxima. Each
    carries its step, so readings of different steps are never mixed. If a rank stops taking part, the exchange is
    switched off, and the arrays are returned as they were given: those of this rank alone.
    """

    def __init__(
        self,
        name: str,
        rank: int,
        num_ranks: int,
        shards: Callable[[], Shards | None],
        log: Log | None = None,
        directory: Path | None = None,
        candidate: Candidate | None = None,
    ) -> None:
        """`name` tells this exchange from others, such as that of a second monitor, and is the same on all ranks.

        `directory` is that of the run; rank 0 tells it to the others, which keep their logs there. `candidate` is for a
        model that may be a stage of a pipeline.
        """
        self.rank, self.num_ranks = rank, num_ranks
        self._name = name
        self._candidate = candidate
        self._role: Role | None = None
        self._has_role = threading.Event()
        if candidate is None or candidate.is_sure:
            self._take_role(None)
        self._ranks: Sequence[int] = range(num_ranks)
        """The ranks that hold this model or stage."""
        self._stage: Peers | None = None
        """The connection of these ranks."""
        self._leaders: Peers | None = None
        """The connection of the first ranks of all stages; None without stages, and on other ranks."""
        self.stages: Stages | None = None
        """The stages of the pipeline, on the rank that records; None without stages."""
        self._is_settled = False
        self._log, self._directory = log, directory
        self._neighbors: Neighbors | None = None
        self.off = ""
        """Why the exchange is switched off; empty while it works."""
        self.has_met = False
        """Whether all ranks have been connected."""
        self.bytes_sent = 0
        """What this rank has handed to the exchange."""
        self.thread_seconds = 0.0
        """Processor time of the thread."""
        self._shards = shards
        self._waiting: deque[_Parcel] = deque()
        self._latest: _Parcel | None = None
        self._queue: queue.SimpleQueue[_Parcel | _Question | None] = queue.SimpleQueue()
        self._asked: _Question | None = None
        self._layouts: dict[tuple[float, ...], tuple[str, ...]] = {}
        self._lost: set[str] = set()
        """The readings of shards that another rank did not send in the last step that had them."""
        self._dense_until = -1
        self._windows: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        self._interval = (0, 0)
        self._intervals: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        self._wants_stop = self._knows_of_stop = self._has_stopped = False
        self._wants_action = self._knows_of_action = False
        self._closed_at = math.inf
        self._exit = Exit()
        self._thread = threading.Thread(target=self._run, name="forewarn ranks", daemon=True)
        self._thread.start()
        weakref.finalize(self, self._exit.begin, self._thread)  # at exit; the thread keeps this object until it ends

    @property
    def records(self) -> bool:
        """Whether this rank judges and records the run."""
        return self.rank == 0

    @property
    def is_lost(self) -> bool:
        """Whether readings are those of this rank alone, although the run has not ended."""
        return self.off not in ("", _ENDED)

    def send(self, label: Collected, arrays: list[Array]) -> None:
        """Hand in the arrays of a step that every rank completes."""
        label, arrays = _settled(label, arrays)
        self._take_role(label)
        parcel = _Parcel((label, arrays), is_exchanged=True)
        parcel.word[_Word.STEP] = label.step
        parcel.word[_Word.DENSE_UNTIL], self._dense_until = self._dense_until, -1
        parcel.word[_Word.DENSE_FROM] = label.step + _STEPS_AHEAD + len(self._waiting)
        parcel.word[[_Word.INTERVAL_FROM, _Word.INTERVAL]], self._interval = self._interval, (0, 0)
        parcel.word[_WISHES] = self.wishes() if label.wishes is None else label.wishes
        self._latest = parcel
        self._hand_in(parcel)

    def keep(self, label: Collected, arrays: list[Array]) -> None:
        """Hand in values of this rank alone, to be returned after the steps before them."""
        self._hand_in(_Parcel((label, arrays), is_exchanged=False))

    def _hand_in(self, parcel: _Parcel) -> None:
        self._waiting.append(parcel)
        if self.off:
            parcel.done.set()
        else:
            self._queue.put(parcel)

    def receive(self, wait: bool = False) -> list[tuple[Collected, list[Array]]]:
        """The steps whose exchange is over, in order; `wait` is for checkpoints and for the end of a run."""
        if self.has_met and not self._is_settled:
            self._is_settled = True
            if self._candidate is not None:
                self._candidate.belongs_to(self._ranks[0])
        received = []
        while self._waiting:
            parcel = self._waiting[0]
            if wait:
                parcel.done.wait(_SECONDS_FOR_LAST)
            if not parcel.done.is_set() and not self.off:
                behind = len(self._waiting) >= _STEPS_BEHIND and time.monotonic() - parcel.sent > _SECONDS_BEHIND
                if not behind:
                    break
                self._switch_off("another rank is no longer watched" if self.has_met else NEVER_MET)
            step, arrays = parcel.content
            if parcel.is_exchanged and not parcel.is_combined and self.off == _ENDED:
                step, arrays = self._combined(step, arrays, {})  # shards alone would look like another model
            if self.stages is not None and not parcel.is_combined:
                step.context.other_stages = OtherStages(self.stages)
            received.append((step, arrays))
            self._waiting.popleft()
        return received

    def escalate(self, until: int) -> None:
        """Ask all ranks to measure every step up to `until`, from an agreed step on."""
        self._dense_until = max(self._dense_until, until)

    def windows(self) -> list[tuple[int, int]]:
        """The first and last step of the new stretches in which every step is measured."""
        return _emptied(self._windows)

    def stretch(self, first: int, every: int) -> None:
        """Ask all ranks to measure only one step in `every` from step `first` on."""
        self._interval = (first, every)

    def intervals(self) -> list[tuple[int, int]]:
        """The new intervals, each with its first step."""
        return _emptied(self._intervals)

    def wishes(self) -> tuple[bool, ...]:
        """What this rank says about stopping and acting at the end of the current step.

        If it says anything, the step must be sent before the next one ends, for all ranks follow at the same step.
        """
        return self._wants_stop, self._knows_of_stop, self._wants_action, self._knows_of_action

    def ask_to_stop(self) -> None:
        """Ask all ranks to stop at the same step."""
        self._wants_stop = True

    def stops_now(self) -> bool:
        """Whether all ranks stop at the step that was sent last.

        If a rank wants to stop, this waits for the others: each of them sends that it knows, and stops at the first
        step at which all did.
        """
        parcel = self._awaited(_Word.KNOWS_OF_STOP)
        return parcel is not None and parcel.stops

    def ask_to_act(self) -> None:
        """Ask all ranks to act after the same step."""
        self._wants_action = True

    def acts_now(self) -> bool:
        """Whether all ranks act after the step that was sent last; agreed as in `stops_now`, and as often as needed."""
        parcel = self._awaited(_Word.KNOWS_OF_ACTION)
        acts = parcel is not None and parcel.acts
        self._wants_action &= not acts
        return acts

    def _awaited(self, word: _Word) -> _Parcel | None:
        """The parcel that was sent last, once all ranks have sent theirs; None if this rank said no such word in it."""
        parcel = self._latest
        if self.off or parcel is None or not parcel.word[word]:
            return None
        if not parcel.done.wait(_SECONDS_TO_AGREE):
            self._switch_off("the other ranks did not answer")
        return parcel

    def word_of_rank_0(self, step: int, text: bytes) -> bytes | None:
        """What rank 0 says at a step at which all ranks ask; waits for all of them. None if the exchange is off."""
        words = self.words(step, text)
        return None if words is None else words[0]

    def words(self, step: int, text: bytes) -> list[bytes] | None:
        """What each rank says at a step at which all of them do; waits for all of them. None if the exchange is off."""
        return self._ask(_Question(step, text)).answers

    def total(self, step: int, numbers: Array) -> Array | None:
        """The sum over the ranks that hold this model or stage, all of which ask for it; waits for them.

        None if the exchange is off, or if the ranks have given different counts of numbers.
        """
        return self._ask(_Question(step, numbers=numbers)).total

    def _ask(self, question: _Question) -> _Question:
        if not self.off:
            self._take_role(None)
            self._asked = question
            self._queue.put(question)
            if not question.done.wait(_SECONDS_TO_AGREE):
                self._switch_off("the other ranks did not answer")
        return question

    def finish(self, reason: str = "not closed", *, has_failed: bool = False) -> list[tuple[Collected, list[Array]]]:
        """End the exchange and return the rest: waits for messages under way, but not for ranks that are gone.

        After an error it hardly waits: the others may wait for this rank, and never send what is missing.
        """
        if math.isinf(self._closed_at):
            self._closed_at = time.monotonic()
            self._take_role(None)
            self._queue.put(None)
            end = self._closed_at + (_SECONDS_AFTER_ERROR if has_failed else _SECONDS_AT_THE_END)
            for parcel in self._waiting:
                parcel.done.wait(max(0.0, end - time.monotonic()))
            self._thread.join(0.0 if self.off or has_failed else _SECONDS_FOR_LAST)
            self._switch_off(_ENDED if self.has_met else NEVER_MET)
            if self._neighbors is not None:
                self._neighbors.close()
            if self._log is not None:
                self._log.close(reason)
        return self.receive()

    def _is_wanted(self) -> bool:
        """Whether to go on looking for the other ranks; a short run may end before they have met."""
        return not self.off and time.monotonic() < self._closed_at + _SECONDS_AT_THE_END / 2

    def _switch_off(self, reason: str) -> None:
        if not self.off:
            self.off = _ENDED if self.has_met and not math.isinf(self._closed_at) else reason
            if self.is_lost:
                _log.warning(
                    "the monitors of the ranks are not connected (%s); training goes on, and the readings are those of "
                    "this rank alone", reason,
                )  # fmt: skip
        for parcel in list(self._waiting):
            parcel.done.set()
        if self._asked is not None:
            self._asked.done.set()

    def _take_role(self, step: Collected | None) -> None:
        """Say what this rank does, once: after its first step, or when nothing more will be known."""
        if not self._has_role.is_set():
            try:
                self._role = Role() if self._candidate is None else self._candidate.role(step)
            except Exception:
                _log.exception("the monitor does not know what this rank does; training goes on")
                self._role = Role()
            self._has_role.set()

    def _run(self) -> None:
        """The thread: meet the other ranks, then exchange one parcel after another."""
        try:
            peers = self._meet()
            if peers is None:
                self._switch_off(NEVER_MET)
                return
            self.has_met = True
            while (parcel := self._queue.get()) is not None and not self.off:
                if isinstance(parcel, _Question):
                    self._answer(peers, parcel)
                    continue
                if parcel.is_exchanged:
                    self._exchange(peers, parcel)
                parcel.done.set()
                if self._log is not None:
                    self._log.completed(parcel.content[0].step)
                self.thread_seconds = time.thread_time()
            if not self.off:
                peers.gather(_farewell())  # so that no rank takes its connection away while another still uses it
        except Exception as error:
            self._switch_off(f"{type(error).__name__}: {error}")

    def _meet(self) -> Peers | None:
        """Meet the other ranks, and find out which of them hold the same model or stage."""
        if not self._exit.happened(self._has_role.is_set, self._is_wanted):
            return None
        candidate, role = self._candidate, self._role or Role()
        names: dict[str, Accepts] = {} if candidate is not None and candidate.is_sure else {self._name: bool}
        if candidate is not None:
            names[candidate.meeting] = _are_stages
        met = Peers.meet(names, json.dumps(role.to_json()).encode(), self._is_wanted, self._exit)
        if met is None:
            return None
        peers, texts = met
        stages = () if candidate is None else stages_of(_roles(texts))
        self._stage = peers
        if candidate is not None and stages:
            self._ranks = next(ranks for ranks in stages if self.rank in ranks)
            self._stage = peers.among(self._ranks, f"stage {self._ranks[0]}")
            leaders = sorted(ranks[0] for ranks in stages)
            if self.rank in leaders:
                self._leaders = peers.among(leaders, "leaders")
                infos = self._leaders.all_texts(json.dumps(candidate.info.to_json(enums=int)).encode())
                by_rank = dict(zip(leaders, infos, strict=True))
                if self.records:
                    of_stages = [RunInfo.from_json(json.loads(by_rank[ranks[0]])) for ranks in stages]
                    self.stages = Stages(stages, of_stages, candidate.catalogue)
        if self._log is not None:
            self._introduce(peers, self._log)
        return peers

    def _introduce(self, peers: Peers, log: Log) -> None:
        """Begin the log, and watch the processes of the other ranks on this machine."""
        own = {"directory": str(self._directory or ""), "machine": machine(), "process": os.getpid()}
        ranks = [json.loads(rank) for rank in peers.all_texts(json.dumps(own).encode())]
        log.begin(Path(ranks[0]["directory"]), self.num_ranks)
        here = {rank: one["process"] for rank, one in enumerate(ranks) if rank != self.rank and own["machine"]}
        here = {rank: process for rank, process in here.items() if ranks[rank]["machine"] == own["machine"]}
        self._neighbors = Neighbors(here, log.saw_end)

    def _exchange(self, peers: Peers, parcel: _Parcel) -> None:
        assert self._stage is not None
        stage, place, size = self._stage, self._stage.rank, self._stage.num_ranks
        shards = self._shards()
        is_twin = shards is not None and shards.is_twin
        entries = _entries(*parcel.content)
        if parcel.content[0].context.first_rank != self._ranks[0]:  # it was not known yet which rank reads what
            entries = [entry.without_values() if entry.part.is_sharded else entry for entry in entries]
        layout = Layout.of(entries)
        parcel.word[_Word.MARK], parcel.word[_Word.LENGTH] = layout.mark, len(layout.text)
        sums, most = pack(entries, place, size, is_twin)
        riding = np.zeros(_MAX_RIDING)
        rides = len(sums) + len(most) <= _MAX_RIDING
        if rides:
            riding[: len(sums) + len(most)] = np.concatenate([sums, most])
        words = peers.gather(np.concatenate([parcel.word, riding]))
        self.bytes_sent += words[0].nbytes
        self._check(words)
        self._heed(parcel, words)
        words = words[list(self._ranks)]
        common = self._common(stage, layout, words)
        if common != layout.keys or not (words[:, _Word.MARK] == layout.mark).all():
            by_key = {entry.key: entry for entry in entries}
            entries, rides = [by_key[key] for key in common], False
            sums, most = pack(entries, place, size, is_twin)
        if rides:
            together = words[:, len(_Word) :]
            sums, most = together[:, : len(sums)].sum(axis=0), together[:, len(sums) :][:, : len(most)].max(axis=0)
        else:
            self.bytes_sent += sums.nbytes + most.nbytes
            sums, most = stage.sums(sums), stage.maxima(most)
        if place == 0:
            arrays = unpack(entries, sums, most, size)
            combined = {entry.key: array for entry, array in zip(entries, arrays, strict=True)}
            parcel.content = self._combined(*parcel.content, combined)
            if self._leaders is not None:
                self._report(self._leaders, *parcel.content)
        parcel.is_combined = True

    def _report(self, leaders: Peers, step: Collected, arrays: Sequence[Array]) -> None:
        """Tell the rank that records what this stage has read; on that rank, hear what the others have."""
        assert self._candidate is not None
        own = b"" if self.records else encoded(self._candidate.read(step, arrays), step.context)
        self.bytes_sent += len(own)
        texts = leaders.all_texts(own)
        if self.stages is not None:
            step.context.other_stages = OtherStages.of(self.stages, texts)

    def _answer(self, peers: Peers, question: _Question) -> None:
        word = np.zeros(len(_Word) + _MAX_RIDING)  # as long as that of a step, from which its own number tells it
        word[_Word.STEP], word[_Word.LENGTH] = _QUESTION - question.step, len(question.text)
        if question.numbers is not None:
            assert self._stage is not None
            word[_Word.LENGTH] = len(question.numbers)
            words = self._stage.gather(word)
            self._check(words)
            if (words[:, _Word.LENGTH] == len(question.numbers)).all():
                question.total = self._stage.sums(question.numbers.copy())
                self.bytes_sent += question.numbers.nbytes
        else:
            words = peers.gather(word)
            self._check(words)
            question.answers = peers.gather_texts(question.text, [int(length) for length in words[:, _Word.LENGTH]])
        question.done.set()

    def _combined(
        self, step: Collected, arrays: Sequence[Array], combined: Mapping[str, Array]
    ) -> tuple[Collected, list[Array]]:
        """The step with the combined arrays. Readings of shards that not every rank has sent are left out."""
        step.context.ranks = self._ranks
        step.context.each_rank = {
            key.removeprefix(_EACH): array[:, 0] for key, array in combined.items() if key.startswith(_EACH)
        }
        kept: list[tuple[Probe, Pending]] = []
        everything: list[Array] = []
        for probe, pending, own in _by_probe(step, arrays):
            keys = _keys(probe, pending, own)
            of_shards = {part.label: key for part, key in zip(pending.parts, keys, strict=False) if part.is_sharded}
            lost = {label for label, key in of_shards.items() if key not in combined}
            for label in (lost ^ (self._lost & of_shards.keys())) if self.off != _ENDED else ():
                reason = Reason.NOT_ON_EVERY_RANK if label in lost else Reason.AVAILABLE
                step.context.unavailable(label.partition(" ")[0], reason)
            self._lost = (self._lost - of_shards.keys()) | lost
            if not lost:
                kept.append((probe, pending))
                everything += [combined.get(key, array) for key, array in zip(keys, own, strict=True)]
        return step._replace(pending=kept), everything

    def _check(self, words: Array) -> None:
        """Raise if a rank has closed its monitor or is at another step."""
        steps = words[:, _Word.STEP]
        if (steps == _CLOSED).any():
            raise RuntimeError(f"rank {np.flatnonzero(steps == _CLOSED)[0]} has closed its monitor")
        if (steps != steps[0]).any():
            raise RuntimeError(f"the ranks are at different steps: {', '.join(f'{step:.0f}' for step in steps[:8])}")

    def _heed(self, parcel: _Parcel, words: Array) -> None:
        """Follow what the ranks ask for."""
        parcel.stops = bool(words[:, _Word.KNOWS_OF_STOP].all())
        self._has_stopped |= parcel.stops
        asked = bool(words[:, [_Word.WANTS_STOP, _Word.KNOWS_OF_STOP]].any())
        self._knows_of_stop = asked and not self._has_stopped
        parcel.acts = bool(words[:, _Word.KNOWS_OF_ACTION].all())
        wanted = bool(words[:, [_Word.WANTS_ACTION, _Word.KNOWS_OF_ACTION]].any())
        self._knows_of_action = wanted and not parcel.acts
        until = int(words[0, _Word.DENSE_UNTIL])
        if until >= 0:
            self._windows.put((int(words[0, _Word.DENSE_FROM]), until))
        every = int(words[0, _Word.INTERVAL])
        if every:
            self._intervals.put((int(words[0, _Word.INTERVAL_FROM]), every))

    def _common(self, peers: Peers, layout: Layout, words: Array) -> tuple[str, ...]:
        """The keys that all ranks have, in the same order on all; those of rank 0 decide it."""
        marks = tuple(words[:, _Word.MARK].tolist())
        if marks == (layout.mark,) * len(marks):
            return layout.keys
        if marks not in self._layouts:
            texts = peers.gather_texts(layout.text, [int(length) for length in words[:, _Word.LENGTH]])
            layouts = [Layout.read(text).keys for text in texts]
            everywhere = set(layouts[0]).intersection(*layouts[1:])
            if len(self._layouts) >= _MAX_LAYOUTS:
                self._layouts.clear()
            self._layouts[marks] = tuple(key for key in layouts[0] if key in everywhere)
        return self._layouts[marks]


def _roles(texts: Sequence[bytes]) -> list[Role]:
    return [Role.from_json(json.loads(text)) for text in texts]


def _are_stages(texts: Sequence[bytes]) -> bool:
    """Whether these ranks, which watch models of different names, train the stages of a pipeline."""
    roles = _roles(texts)
    are_numbered = any(role.num_stages for role in roles)
    return bool(stages_of(roles)) and (are_numbered or len({role.names for role in roles}) > 1)


def _settled(step: Collected, arrays: Sequence[Array]) -> tuple[Collected, list[Array]]:
    """The step with what its probes exchange in place of what they have measured."""
    settled: list[tuple[Probe, Pending]] = []
    everything: list[Array] = []
    for probe, pending, own in _by_probe(step, arrays):
        try:
            to_exchange = pending if pending.settle is None else pending.settle(own)
        except Exception:  # without this step's message, the ranks would be at different steps
            _log.exception("the readings of the probe %r are left out of this step; training goes on", probe.name)
            continue
        settled.append((probe, to_exchange))
        everything += own if to_exchange is pending else [np.asarray(array) for array in to_exchange.tensors]
    return step._replace(pending=settled), everything


def _entries(step: Collected, arrays: Sequence[Array]) -> list[Entry]:
    """The arrays of a step that are exchanged, with their names."""
    entries = [
        Entry(key, part, array)
        for probe, pending, own in _by_probe(step, arrays)
        for key, part, array in zip(_keys(probe, pending, own), pending.parts, own, strict=False)
        if part.how is not How.OWN
    ]
    return entries + [
        Entry(f"{_EACH}{part.label}", Part(How.EACH), summary(part.how, array))
        for _, part, array in entries
        if part.each
    ]


def _by_probe(step: Collected, arrays: Sequence[Array]) -> Iterator[tuple[Probe, Pending, Sequence[Array]]]:
    """The pending readings of a step, each with its own arrays."""
    start = 0
    for probe, pending in step.pending:
        yield probe, pending, arrays[start : (start := start + len(pending.tensors))]


def _keys(probe: Probe, pending: Pending, own: Sequence[Array]) -> list[str]:
    """The names of the arrays of one pending reading."""
    parts = [*pending.parts, *[OWN] * (len(own) - len(pending.parts))]
    return [key_of(probe.name, index, part, array) for index, (part, array) in enumerate(zip(parts, own, strict=True))]


def _emptied(wishes: queue.SimpleQueue[tuple[int, int]]) -> list[tuple[int, int]]:
    emptied = []
    while not wishes.empty():
        emptied.append(wishes.get())
    return emptied


def _farewell() -> Array:
    """The last message of a rank."""
    words = np.zeros(len(_Word) + _MAX_RIDING)
    words[_Word.STEP] = _CLOSED
    return words
