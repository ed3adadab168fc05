"""The recent past in memory: one ring [window × scopes] per metric, in float32 exactly as stored."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from operator import itemgetter
from typing import Any, Literal

import numpy as np

from forewarn.catalogue import Cadence, Catalogue, Scope
from forewarn.judge.series import Baseline, Panel, Series
from forewarn.judge.spike import Spike
from forewarn.metrics import BUILT_IN
from forewarn.types import Block

_SLACK = 4
"""A ring is a quarter longer than its window: with less it would be moved to the front more often."""

_UNJUDGED_WINDOW = 8
"""Readings kept of what no rule looks at, for people and for snapshots."""

_FEW_SCOPES = 8
"""With no more than these a ring lies in memory by scope: it is the course of each that is looked at then."""

_NO_PANEL = Panel((), np.empty(0, np.int64), np.empty((0, 0), np.float32))


class _Ring:
    """The last readings of one metric; somewhat longer than its window, so that a window is always one slice."""

    def __init__(self, scopes: tuple[str, ...], window: int) -> None:
        self.scopes = scopes
        self.window = window
        self.seen = 0
        self.baselines: dict[tuple[str, tuple[float, ...]], Baseline] = {}
        """By scope and by what makes a baseline what it is."""
        self._end = 0
        self._panel: Panel | None = None
        """What rules see of the readings up to now; None until one looks."""
        room = window + max(1, window // _SLACK)
        self._steps = np.zeros(room, np.int64)
        order: Literal["C", "F"] = "F" if len(scopes) <= _FEW_SCOPES else "C"
        self._values = np.full((room, len(scopes)), np.nan, np.float32, order)

    def append(self, block: Block) -> None:
        self._panel = None
        usual = block.scopes is self.scopes or block.scopes == self.scopes
        if not usual:
            self._make_room(block.scopes)
        if self._end == len(self._steps):
            keep = self.window - 1
            self._steps[:keep] = self._steps[self._end - keep :]
            self._values[:keep] = self._values[self._end - keep :]
            self._end = keep
        if usual or block.scopes == self.scopes:
            self._values[self._end] = block.values
        else:
            self._values[self._end] = np.nan
            position = {scope: at for at, scope in enumerate(self.scopes)}
            self._values[self._end, [position[scope] for scope in block.scopes]] = block.values
        self._steps[self._end] = block.step
        self._end += 1
        self.seen += 1

    def _make_room(self, scopes: tuple[str, ...]) -> None:
        known = set(self.scopes)
        added = tuple(scope for scope in scopes if scope not in known)
        if added:
            blank = np.full((len(self._values), len(added)), np.nan, np.float32)
            self._values = np.concatenate([self._values, blank], axis=1)
            self.scopes += added

    def panel(self) -> Panel:
        if self._panel is None:
            window = slice(max(0, self._end - self.window), self._end)
            self._panel = Panel(self.scopes, self._steps[window], self._values[window], self.baseline)
        return self._panel

    def baseline(self, scope: str, spike: Spike) -> Baseline:
        """The usual level of a scope, up to now; each reading joins it once, whoever asks."""
        identity = scope, spike.key
        baseline = self.baselines.get(identity)
        if baseline is None:
            baseline = self.baselines[identity] = Baseline(spike)
            baseline.seen = self.seen - len(self.panel())
        new = min(self.seen - baseline.seen, self._end)
        for value in self._values[self._end - new : self._end, self.scopes.index(scope)].tolist():
            baseline.observe(value)
        baseline.seen = self.seen  # what fell out of the ring unseen does not come back
        return baseline

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
        ring._end = len(state["steps"])
        ring._steps[: ring._end] = state["steps"]
        ring._values[: ring._end] = state["values"]
        ring.seen = int(state["seen"])
        for plain in state["baselines"]:
            if "scope" not in plain:
                continue  # of an earlier version: levels are found anew from the readings that are kept
            spike = Spike.from_key(plain["key"])
            ring.baselines[plain["scope"], spike.key] = Baseline.from_state(spike, plain)
        return ring


class History:
    """The last readings of every metric: what rules look at, live and replayed."""

    def __init__(
        self,
        window: int = 1024,
        detail_window: int = 64,
        judged: Iterable[str] | None = None,
        catalogue: Catalogue = BUILT_IN,
    ) -> None:
        """`judged`: the metrics that rules look at, by default all; fewer readings of the others are kept.

        One with a `*` in it stands for a family of them.
        """
        self._catalogue = catalogue
        self._judged = None if judged is None else frozenset(judged)
        self._window = window
        self._detail_window = detail_window
        self._rings: dict[str, _Ring] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._rings

    def names(self) -> list[str]:
        return sorted(self._rings)

    def append(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            ring = self._rings.get(block.name)
            if ring is None:
                ring = self._rings[block.name] = _Ring(block.scopes, self._window_of(block))
            ring.append(block)

    def _window_of(self, block: Block) -> int:
        is_judged = self._judged is None or _is_among(block.name, self._judged)
        metric = self._catalogue.find(block.name)
        if metric is not None and metric.cadence is Cadence.EVERY_STEP and metric.scope in (Scope.RUN, Scope.GROUP):
            return self._window
        if block.scopes == ("",):
            stands_for_many = metric is not None and metric.scope is not Scope.RUN
            return self._detail_window if stands_for_many and not is_judged else self._window
        return self._detail_window if is_judged else _UNJUDGED_WINDOW

    def panel(self, name: str) -> Panel:
        """All scopes of a metric; empty if it was never read."""
        ring = self._rings.get(name)
        return _NO_PANEL if ring is None else ring.panel()

    def series(self, name: str, scope: str = "") -> Series:
        """One scope of a metric; empty if it was never read."""
        return Series(self.panel(name), scope)

    def state_dict(self) -> dict[str, Any]:
        return {name: ring.state_dict() for name, ring in self._rings.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._rings = {name: _Ring.from_state(one) for name, one in state.items()}


def _is_among(name: str, names: frozenset[str]) -> bool:
    return name in names or any(fnmatchcase(name, each) for each in names if "*" in each)
