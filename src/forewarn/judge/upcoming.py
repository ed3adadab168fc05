"""Stored readings that are about to join the history, many steps of a metric at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from forewarn.judge.history import History
from forewarn.judge.series import Bools, Floats, Panel, Steps
from forewarn.judge.spike import Spike
from forewarn.types import Values

NEARLY = 0.999
"""Looking ahead, a distance that is shorter by rounding counts as well."""

_WHOLE = ("",)


class Column(NamedTuple):
    """All readings of one metric among the upcoming steps."""

    scopes: tuple[str, ...]
    rows: NDArray[np.int64]
    """The position of each reading among the upcoming steps."""
    steps: Steps
    values: Values
    """Shape [readings × scopes]."""


class Upcoming:
    """The readings of the next steps. The history ends before them."""

    def __init__(self, history: History, names: Iterable[str], columns: Mapping[str, Column]) -> None:
        """`names`: all metrics of these steps; `columns`: those whose scopes stay the same."""
        self.history = history
        self.columns = columns
        self._names = frozenset(names)
        self._ahead: list[Callable[[], None]] = []
        """What brings the levels of the history up to the last upcoming reading."""
        self._outliers: dict[tuple[str, tuple[float, ...]], Bools] = {}

    def __contains__(self, name: str) -> bool:
        return name in self.history or name in self._names

    def whole(self, name: str) -> Floats | None:
        """The upcoming values of a metric of the run as a whole; None of any other."""
        column = self.columns[name]
        return column.values[:, 0].astype(np.float64) if column.scopes == _WHOLE else None

    def joined(self, name: str) -> Panel | None:
        """The readings in memory, then the upcoming ones; None if the scopes differ."""
        earlier, column = self.history.panel(name), self.columns[name]
        if not len(earlier):
            return Panel(column.scopes, column.steps, column.values)
        if earlier.scopes != column.scopes:
            return None
        return Panel(
            column.scopes,
            np.concatenate([earlier.steps, column.steps]),
            np.concatenate([earlier.values, column.values]),
        )

    def outliers(self, name: str, spike: Spike) -> Bools | None:
        """Which upcoming values of a metric of the run as a whole are above its usual level; None if there is none."""
        identity = name, spike.key
        if identity not in self._outliers:
            values, level = self.whole(name), self.history.known_baseline(name, spike)
            if values is None or level is None:
                return None
            scout = level.copy()
            self._outliers[identity] = np.array(scout.outliers(values.tolist()), np.bool_)
            self._ahead.append(partial(level.become, scout))
        return self._outliers[identity]

    def rolling_medians(self, name: str, window: int) -> tuple[Floats, Bools] | None:
        """The rolling median at each upcoming reading, and whether it may have risen over two windows in a row."""
        values, level = self.whole(name), self.history.known_median(name, window)
        if values is None or level is None:
            return None
        scout = level.copy()
        medians, rising = [], []
        for value in values.tolist():
            scout.observe(value)
            medians.append(scout.at(0))
            rising.append(scout.is_rising())
        self._ahead.append(partial(level.become, scout))
        return np.array(medians), np.array(rising, np.bool_)

    def settle(self) -> None:
        """After all upcoming readings have joined the history: what was computed ahead need not be computed again."""
        for bring in self._ahead:
            bring()


Lookahead = Callable[[str, Upcoming], Bools | None]
"""For each upcoming reading of a metric: whether the check may find something, or cannot judge, when it arrives.

None if every one of them must be checked."""


def any_of(flags: Bools) -> Bools:
    """For each reading, whether it is so in any scope."""
    any_scope: Bools = np.logical_or.reduce(flags, axis=1)
    return any_scope


def never(metric: str, upcoming: Upcoming) -> Bools:
    """For a check that cannot find anything in this run."""
    return np.zeros(len(upcoming.columns[metric].steps), np.bool_)


def both(first: Lookahead, second: Lookahead) -> Lookahead:
    """Looks ahead at what two say: something may be found only where each of them says so."""

    def look(metric: str, upcoming: Upcoming) -> Bools | None:
        one, other = first(metric, upcoming), second(metric, upcoming)
        return other if one is None else one if other is None else one & other

    return look
