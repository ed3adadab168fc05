"""Recent readings in memory: one ring buffer [window × scopes] per metric, in float32 as stored."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache
from itertools import groupby
from operator import attrgetter, itemgetter
from typing import Any, Literal, NamedTuple

import numpy as np

from forewarn.catalogue import Cadence, Catalogue, Scope
from forewarn.judge.series import Baseline, Newest, Panel, RollingMedian, Series, Steps
from forewarn.judge.spike import Spike
from forewarn.metrics import BUILT_IN
from forewarn.rows import Row, RowLayout, Sheet
from forewarn.types import Block, Values

_log = logging.getLogger("forewarn")

_RULE_FAILED = "monitor/rule_failed"
_DERIVED = "derived"
"""Key of the derivations in the state. Metric names contain a slash, so it cannot clash."""

_PATTERNS = 64
"""Number of cached combinations of metrics; the steps of a run differ in few ways."""

_SLACK = 4
"""A ring is a quarter longer than its window; in a shorter one, values would be moved more often."""

_FIRST_ROOM = 16
"""Number of readings that a ring has room for at first: most metrics get few, and a window may hold a thousand."""

_MOST_LATE = 64
"""Maximum number of rows that the rings do not have yet."""

_UNJUDGED_WINDOW = 8
"""Number of readings kept of metrics that no rule reads, for views and snapshots."""

_SHORT = (Scope.RUN, Scope.GROUP, Scope.PHASE)
"""Scopes of which there are few, so that many readings fit in memory."""

_FEW_SCOPES = 8
"""Up to this many scopes, a ring is stored scope by scope, because rules then read one series at a time."""


class _Ring:
    """The last readings of one metric; somewhat longer than its window, so that a window is always one slice."""

    def __init__(self, scopes: tuple[str, ...], window: int) -> None:
        self.scopes = scopes
        self.window = window
        self.seen = 0
        self.baselines: dict[tuple[str, tuple[float, ...]], Baseline] = {}
        """By scope and by the settings of the baseline."""
        self._medians: dict[tuple[str, int], RollingMedian] = {}
        """By scope and window."""
        self.asked: list[Baseline | RollingMedian] = []
        """The levels of the run as a whole that gates ask for on every step: they are always up to date."""
        self.newest: Newest | None = None
        """The same for the newest readings of all scopes."""
        self._end = 0
        self._panel: Panel | None = None
        """The readings as rules see them; None until a rule asks."""
        self._most_room = window + max(1, window // _SLACK)
        self._room = 0
        """Number of readings that the arrays can hold."""
        self._order: Literal["C", "F"] = "F" if len(scopes) <= _FEW_SCOPES else "C"
        self._steps = np.empty(0, np.int64)
        self._values = np.empty((0, len(scopes)), np.float32)
        self._grow(_FIRST_ROOM)

    def append(self, block: Block) -> None:
        values, scopes = block.values, block.scopes
        if scopes is not self.scopes and scopes != self.scopes:
            self._make_room(scopes)
            if scopes != self.scopes:
                position = {scope: index for index, scope in enumerate(self.scopes)}
                values = np.full(len(self.scopes), np.nan, np.float32)
                values[[position[scope] for scope in scopes]] = block.values
        self.add(block.step, values)

    def add(self, step: int, values: Values) -> None:
        """Add one reading of all scopes."""
        self._panel = None
        end = self._end
        if end == self._room:
            if self._room < self._most_room:
                self._grow(2 * self._room)
            else:
                self._keep(self.window - 1)
                end = self._end
        self._values[end] = values
        self._steps[end] = step
        self._end = end + 1
        self.seen += 1
        if self.asked:
            self.catch_up()
        if self.newest is not None:
            self.newest.observe(self._values[end].tolist())

    def extend(self, steps: Steps, values: Values) -> None:
        """Add several readings of all scopes. What gates ask for has seen them already, or catches up later."""
        self._panel = None
        self.seen += len(steps)
        steps, values = steps[-self.window :], values[-self.window :]
        if self._end + len(steps) > self._room:
            self._grow(2 * (self._end + len(steps)))
        if self._end + len(steps) > self._room:
            self._keep(min(self.window - 1, self._end, self._room - len(steps)))
        end = self._end + len(steps)
        self._steps[self._end : end] = steps
        self._values[self._end : end] = values
        self._end = end

    def catch_up(self) -> None:
        """Show the levels that gates ask for the readings that they have not seen."""
        for level in self.asked:
            self._catch_up(level, "")

    def _keep(self, count: int) -> None:
        """Drop all but the newest readings."""
        self._steps[:count] = self._steps[self._end - count : self._end]
        self._values[:count] = self._values[self._end - count : self._end]
        self._end = count

    def _grow(self, room: int) -> None:
        """Make room for this many readings, but not for more than a ring may hold."""
        end, room = self._end, min(room, self._most_room)
        if room > self._room:
            steps, values = self._steps, self._values
            self._steps = np.zeros(room, np.int64)
            self._values = np.full((room, values.shape[1]), np.nan, np.float32, self._order)
            self._steps[:end], self._values[:end] = steps[:end], values[:end]
            self._room = room

    def _make_room(self, scopes: tuple[str, ...]) -> None:
        present = set(self.scopes)
        added = tuple(scope for scope in scopes if scope not in present)
        if added:
            blank = np.full((len(self._values), len(added)), np.nan, np.float32)
            self._values = np.concatenate([self._values, blank], axis=1)
            self.scopes += added

    def panel(self) -> Panel:
        if self._panel is None:
            end = self._end
            start = end - self.window if end > self.window else 0
            self._panel = Panel(self.scopes, self._steps[start:end], self._values[start:end], self)
        return self._panel

    def baseline(self, scope: str, spike: Spike) -> Baseline:
        """The usual level of a scope up to now; each reading is added once, whoever asks."""
        identity = scope, spike.key
        baseline = self.baselines.get(identity)
        if baseline is None:
            baseline = self.baselines[identity] = Baseline(spike)
            baseline.seen = self.seen - len(self.panel())
        self._catch_up(baseline, scope)
        return baseline

    def rolling_median(self, scope: str, window: int) -> RollingMedian:
        """The same for medians, which are not saved: the kept readings restore them."""
        rolling = self._medians.get((scope, window))
        if rolling is None:
            rolling = self._medians[scope, window] = RollingMedian(window)
            rolling.seen = self.seen - len(self.panel())
        self._catch_up(rolling, scope)
        return rolling

    def has_median(self, scope: str, window: int) -> bool:
        return (scope, window) in self._medians

    def _catch_up(self, level: Baseline | RollingMedian, scope: str) -> None:
        new = self.seen - level.seen
        if new == 1:  # as on every step
            level.observe(self._values.item(self._end - 1, self.scopes.index(scope)))
        elif new:
            new = min(new, self._end, self.window)
            for value in self._values[self._end - new : self._end, self.scopes.index(scope)].tolist():
                level.observe(value)
            level.seen = self.seen  # readings that left the ring are lost

    def state_dict(self) -> dict[str, Any]:
        panel = self.panel()
        return {
            "scopes": list(self.scopes),
            "window": self.window,
            "seen": self.seen,
            "steps": panel.steps.copy(),
            "values": panel.values.copy(),
            "baselines": [
                {"scope": scope, "key": list(key), **baseline.state_dict()}
                for (scope, key), baseline in sorted(self.baselines.items(), key=itemgetter(0))
            ],
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> _Ring:
        ring = cls(tuple(state["scopes"]), int(state["window"]))
        ring._grow(len(state["steps"]))
        ring._end = len(state["steps"])
        ring._steps[: ring._end] = state["steps"]
        ring._values[: ring._end] = state["values"]
        ring.seen = int(state["seen"])
        for plain in state["baselines"]:
            if "scope" not in plain:
                continue  # from an earlier version: the kept readings restore the level
            spike = Spike.from_key(plain["key"])
            ring.baselines[plain["scope"], spike.key] = Baseline.from_state(spike, plain)
        return ring


class _Plan(NamedTuple):
    """How rows and sheets of one layout are added."""

    is_usable: bool
    """Whether the scopes are those of the rings, and nothing that is derived here was recorded."""
    due: list[Derivation]
    """What is derived from them."""
    parts: list[tuple[_Ring, int, int]]
    """The ring of each metric, and where its numbers begin and end."""
    levels: list[tuple[Baseline | RollingMedian, int]]
    """What must see a number at once, and its position."""
    newest: list[tuple[Newest, int, int]]
    """The same for several numbers."""


class Derivation:
    """Readings computed from other readings of a step and the settings of rules, never measured."""

    rule: str
    """The name of the rule whose settings it uses."""
    sources: tuple[str, ...]
    """The metrics that must have a new reading."""
    gives: tuple[str, ...]
    """The metrics that it computes; recorded values of them are replaced."""

    def derive(self, history: History, blocks: Mapping[str, Block]) -> Iterable[Block]:
        """The derived readings of a step from the `blocks` of its sources, by name, which the history has."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict`."""


class History:
    """The last readings of every metric, for rules to read live and in replay."""

    def __init__(
        self,
        window: int = 1024,
        detail_window: int = 64,
        judged: Iterable[str] | None = None,
        derivations: Sequence[Derivation] = (),
        catalogue: Catalogue = BUILT_IN,
    ) -> None:
        """`judged`: the metrics that rules read, by default all; fewer readings of the others are kept.

        A name with a `*` stands for several metrics.
        """
        self._derivations = list(derivations)
        self._due = lru_cache(_PATTERNS)(self._due_for)
        self._catalogue = catalogue
        self._judged = None if judged is None else frozenset(judged)
        self._window = window
        self._detail_window = detail_window
        self._rings: dict[str, _Ring] = {}
        self._late: list[Row] = []
        """The newest rows, which the rings do not have yet."""
        self._behind: dict[str, _Ring] = {}
        """By metric: the rings with levels that have not seen all readings."""
        self._plans: dict[RowLayout, _Plan] = {}
        self._baselines: dict[tuple[str, int], tuple[Baseline, Spike]] = {}
        """By metric and the id of the settings: what gates ask for."""
        self._medians: dict[tuple[str, int], RollingMedian] = {}
        """By metric and window: the same."""
        self._newest: dict[str, Newest] = {}
        """By metric: the same."""
        self._never_read = Panel((), np.empty(0, np.int64), np.empty((0, 0), np.float32))

    def __contains__(self, name: str) -> bool:
        return name in self._rings

    def names(self) -> list[str]:
        return sorted(self._rings)

    def append(self, blocks: Iterable[Block]) -> Sequence[Block]:
        """Add the readings of a step and what is derived from them; returns all added blocks.

        Derived readings from the recording are dropped, because other settings may give other values. A row from which
        nothing is derived is added when somebody asks for its metrics, or with many others.
        """
        if type(blocks) is Row:
            plan = self._plans.get(blocks.layout)
            if plan is None:
                plan = self._plans[blocks.layout] = self._plan(blocks.layout)
            if plan.is_usable and not plan.due:
                numbers = blocks.numbers
                for level, place in plan.levels:
                    level.observe(numbers[place])
                for newest, start, end in plan.newest:
                    newest.observe(numbers[start:end])
                self._late.append(blocks)
                if len(self._late) == _MOST_LATE:
                    self._settle()
                return blocks
        self._settle()
        self._catch_up()
        if type(blocks) is Sheet:
            plan = self._plans.get(blocks.layout)
            if plan is None:
                plan = self._plans[blocks.layout] = self._plan(blocks.layout)
            if plan.is_usable:
                return self._append_sheet(blocks, plan)
        joined = list(blocks)
        due = self._due(tuple([block.name for block in joined]))
        if not due:
            self._take(joined)
            return joined
        stale = _stale(due)
        joined = [block for block in joined if block.name not in stale]
        by_name = {block.name: block for block in joined}
        self._take(joined)
        for derivation in due:
            derived = self._derived(derivation, by_name)
            self._take(derived)
            place = max(index for index, block in enumerate(joined, 1) if block.name in derivation.sources)
            joined[place:place] = derived
        return joined

    def _append_sheet(self, sheet: Sheet, plan: _Plan) -> Sequence[Block]:
        step, values = sheet.step, sheet.values
        for ring, start, end in plan.parts:
            ring.add(step, values[start:end])
        if not plan.due:
            return sheet
        places = sheet.layout.places
        sources = {name: sheet[places[name]] for derivation in plan.due for name in derivation.sources}
        others: dict[int, list[Block]] = {}
        for derivation in plan.due:
            derived = self._derived(derivation, sources)
            self._take(derived)
            others.setdefault(1 + max(places[name] for name in derivation.sources), [])[:0] = derived
        return sheet.with_others(others)

    def derives(self, names: tuple[str, ...]) -> bool:
        """Whether anything is derived from readings of these metrics."""
        return bool(self._due_for(names))

    def extend(self, name: str, scopes: tuple[str, ...], steps: Steps, values: Values) -> None:
        """Add many readings of one metric from which nothing is derived, [readings × scopes].

        The levels that gates ask for catch up before the next step.
        """
        self._settle()
        self._plans.clear()
        ring = self._rings.get(name)
        if ring is not None and ring.scopes == scopes:
            ring.extend(steps, values)
            if ring.newest is not None:
                ring.newest.extend(values)
            if ring.asked:
                self._behind[name] = ring
        else:
            self._take(Block(step, 0.0, name, scopes, row) for step, row in zip(steps.tolist(), values, strict=True))

    def known_baseline(self, name: str, spike: Spike) -> Baseline | None:
        """The usual level of a metric of the whole run, if it was asked for before."""
        ring = self._rings.get(name)
        return None if ring is None or ("", spike.key) not in ring.baselines else ring.baseline("", spike)

    def known_median(self, name: str, window: int) -> RollingMedian | None:
        """The same for its rolling median."""
        ring = self._rings.get(name)
        return None if ring is None or not ring.has_median("", window) else ring.rolling_median("", window)

    def _due_for(self, names: tuple[str, ...]) -> list[Derivation]:
        """The derivations for which these metrics suffice."""
        return [derivation for derivation in self._derivations if set(derivation.sources) <= set(names)]

    def _take(self, blocks: Iterable[Block]) -> None:
        rings = self._rings
        for block in blocks:
            ring = rings.get(block.name)
            if ring is None:
                ring = self._made(block.name, block.scopes)
            before = ring.scopes
            ring.append(block)
            if ring.scopes is not before:
                self._plans.clear()

    def _made(self, name: str, scopes: tuple[str, ...]) -> _Ring:
        ring = self._rings.get(name)
        if ring is None:
            ring = self._rings[name] = _Ring(scopes, self._window_of(name, scopes))
        return ring

    def _plan(self, layout: RowLayout) -> _Plan:
        """How rows of this layout are added; only block by block if something is derived or scopes have changed."""
        self._catch_up()
        rings = [self._made(name, scopes) for name, scopes in zip(layout.names, layout.scopes, strict=True)]
        due = self._due(layout.names)
        is_usable = all(ring.scopes == scopes for ring, scopes in zip(rings, layout.scopes, strict=True)) and not (
            due and _stale(due) & set(layout.names)
        )
        parts = list(zip(rings, layout.starts, layout.starts[1:], strict=False))
        return _Plan(
            is_usable,
            due,
            parts,
            [(level, start + ring.scopes.index("")) for ring, start, _ in parts for level in ring.asked],
            [(ring.newest, start, end) for ring, start, end in parts if ring.newest is not None],
        )

    def _settle(self) -> None:
        """Add the rows that are late to the rings."""
        if not self._late:
            return
        late, self._late = self._late, []
        for layout, rows in groupby(late, attrgetter("layout")):
            together = list(rows)
            steps = np.array([row.step for row in together], np.int64)
            numbers = np.array([row.numbers for row in together], np.float32)
            for ring, start, end in self._plans[layout].parts:
                ring.extend(steps, numbers[:, start:end])

    def _catch_up(self) -> None:
        for ring in self._behind.values():
            ring.catch_up()
        self._behind.clear()

    def _derived(self, derivation: Derivation, blocks: Mapping[str, Block]) -> list[Block]:
        try:
            return list(derivation.derive(self, blocks))
        except Exception:
            _log.exception("%s could not be computed; the rule %s is switched off", derivation.gives, derivation.rule)
            self._derivations.remove(derivation)
            self._due.cache_clear()
            self._plans.clear()
            source = blocks[derivation.sources[0]]
            return [Block(source.step, source.time, _RULE_FAILED, (derivation.rule,), np.ones(1, np.float32))]

    def _window_of(self, name: str, scopes: tuple[str, ...]) -> int:
        is_judged = self._judged is None or _is_among(name, self._judged)
        metric = self._catalogue.find(name)
        if metric is not None and metric.cadence is Cadence.EVERY_STEP and metric.scope in _SHORT:
            return self._window
        if scopes == ("",):
            stands_for_many = metric is not None and metric.scope is not Scope.RUN
            return self._detail_window if stands_for_many and not is_judged else self._window
        return self._detail_window if is_judged else _UNJUDGED_WINDOW

    def panel(self, name: str) -> Panel:
        """All scopes of a metric; empty if it was never read."""
        if self._late:
            self._settle()
        ring = self._rings.get(name)
        return self._never_read if ring is None else ring.panel()

    def series(self, name: str, scope: str = "") -> Series:
        """One scope of a metric; empty if it was never read."""
        return self.panel(name).series(scope)

    def baseline(self, name: str, spike: Spike) -> Baseline:
        """The usual level of a metric of the whole run, without making a series: gates ask on every step."""
        asked_before = self._baselines.get((name, id(spike)))
        if asked_before is not None:
            return asked_before[0]
        ring = self._asked(name)
        if ring is None:
            return Baseline(spike)
        baseline = ring.baseline("", spike)
        self._baselines[name, id(spike)] = baseline, spike  # keeping it prevents reuse of its id
        self._follow(ring, baseline)
        return baseline

    def is_rising(self, name: str, window: int) -> bool:
        """Whether the rolling median of such a metric may have risen over two windows in a row."""
        rolling = self._medians.get((name, window))
        if rolling is None:
            ring = self._asked(name)
            if ring is None:
                return False
            rolling = self._medians[name, window] = ring.rolling_median("", window)
            self._follow(ring, rolling)
        return rolling.is_rising()

    def newest(self, name: str) -> Newest:
        """The newest readings of a metric, just as cheap."""
        newest = self._newest.get(name)
        if newest is None:
            self._settle()
            ring = self._rings.get(name)
            newest = Newest(self.panel(name))
            if ring is not None:
                self._newest[name] = ring.newest = newest
                self._plans.clear()
        return newest

    def _asked(self, name: str) -> _Ring | None:
        """The ring of a metric of the whole run; None if there is none yet."""
        self._settle()
        ring = self._rings.get(name)
        return None if ring is None or "" not in ring.scopes else ring

    def _follow(self, ring: _Ring, level: Baseline | RollingMedian) -> None:
        """Keep a level up to date from now on."""
        if not any(other is level for other in ring.asked):
            ring.asked.append(level)
        self._plans.clear()

    def state_dict(self) -> dict[str, Any]:
        self._settle()
        rings = {name: ring.state_dict() for name, ring in self._rings.items()}
        return {**rings, _DERIVED: {derivation.rule: derivation.state_dict() for derivation in self._derivations}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for of_earlier_rings in (self._late, self._behind, self._plans, self._baselines, self._medians, self._newest):
            of_earlier_rings.clear()
        self._rings = {name: _Ring.from_state(ring) for name, ring in state.items() if name != _DERIVED}
        for derivation in self._derivations:
            derivation.load_state_dict(state.get(_DERIVED, {}).get(derivation.rule, {}))


def _stale(due: Iterable[Derivation]) -> set[str]:
    """The metrics that are dropped from a recording, because these derivations give them anew."""
    return {_RULE_FAILED, *(name for derivation in due for name in derivation.gives)}


def _is_among(name: str, names: frozenset[str]) -> bool:
    return name in names or any(fnmatchcase(name, pattern) for pattern in names if "*" in pattern)
