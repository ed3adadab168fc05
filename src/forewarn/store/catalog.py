"""The layouts and patterns of a run, by number."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from forewarn.store.errors import RunError
from forewarn.store.plain import decoded

LAYOUT_IDS = np.dtype("<i4")

_MOST_VALUES = 1 << 28
"""Maximum values in a row: one GB, the largest blob that SQLite stores."""


@dataclass(frozen=True, slots=True)
class Layout:
    """A metric's name with its scopes."""

    id: int
    name: str
    scopes_id: int
    num_scopes: int


@dataclass(frozen=True, slots=True)
class Pattern:
    """The layouts of a row, in order."""

    layouts: tuple[int, ...]
    shared: bool
    """Whether all blocks of the row have the same time."""
    num_values: int

    @property
    def num_times(self) -> int:
        return min(1, len(self.layouts)) if self.shared else len(self.layouts)


@dataclass(frozen=True, slots=True)
class PatternTable:
    """All patterns as arrays, so that one lookup serves millions of rows."""

    num_times: NDArray[np.int64]
    one_time: bool
    """Whether every pattern has exactly one time, the usual case: rows and times then have the same numbers."""
    num_values: NDArray[np.int64]
    shared: NDArray[np.bool_]
    members: NDArray[np.int64]
    """The layouts of all patterns, one pattern after the other."""
    owners: NDArray[np.int64]
    """The pattern that each member belongs to."""
    positions: NDArray[np.int64]
    """The position of each member in its pattern."""


class Catalog:
    """The layouts and patterns behind the numbers in the database. `refresh` reads new ones; they never change."""

    def __init__(self) -> None:
        self.layouts: list[Layout] = []
        self.patterns: list[Pattern] = []
        self._scopes: dict[int, tuple[str, ...]] = {}
        self._by_name: dict[str, list[Layout]] = {}
        self._table: PatternTable | None = None

    def refresh(self, connection: sqlite3.Connection) -> None:
        for id, name, scopes_id, num_scopes in connection.execute(
            "SELECT id, name, scopes, num_scopes FROM layouts WHERE id >= ? ORDER BY id", [len(self.layouts)]
        ):
            is_count = isinstance(num_scopes, int) and 0 <= num_scopes <= _MOST_VALUES
            if id != len(self.layouts) or not isinstance(name, str) or not is_count:
                raise RunError(f"layout {len(self.layouts)} is missing or damaged")
            layout = Layout(id, name, scopes_id, num_scopes)
            self.layouts.append(layout)
            self._by_name.setdefault(name, []).append(layout)
        for id, shared, packed in connection.execute(
            "SELECT id, shared, layouts FROM patterns WHERE id >= ? ORDER BY id", [len(self.patterns)]
        ):
            if id != len(self.patterns) or not isinstance(packed, bytes) or len(packed) % LAYOUT_IDS.itemsize:
                raise RunError(f"pattern {len(self.patterns)} is missing or damaged")
            self.patterns.append(self._pattern(bool(shared), np.frombuffer(packed, LAYOUT_IDS).tolist()))
            self._table = None

    def layouts_of(self, name: str) -> list[Layout]:
        return self._by_name.get(name, [])

    def scopes_of(self, layout: Layout, connection: sqlite3.Connection) -> tuple[str, ...]:
        """The scopes of a layout, one tuple for all layouts that share them."""
        scopes = self.scopes_by(layout.scopes_id, layout.name, connection)
        if len(scopes) != layout.num_scopes:
            raise RunError(f"{layout.name} is damaged: {layout.num_scopes} scopes were expected, {len(scopes)} found")
        return scopes

    def scopes_by(self, number: int, name: str, connection: sqlite3.Connection) -> tuple[str, ...]:
        """Scopes by number, read on first use. `name` is the metric to name in an error."""
        if number not in self._scopes:
            row = connection.execute("SELECT names FROM scopes WHERE id = ?", [number]).fetchone()
            try:
                scopes = tuple(decoded(row[0]))
            except (TypeError, ValueError) as error:
                raise RunError(f"the scopes of {name} are damaged ({error})") from error
            if not all(isinstance(scope, str) for scope in scopes):
                raise RunError(f"the scopes of {name} are damaged: they are not all text")
            self._scopes[number] = scopes
        return self._scopes[number]

    @property
    def table(self) -> PatternTable:
        if self._table is None:
            lengths = np.array([len(pattern.layouts) for pattern in self.patterns], np.int64)
            starts = np.cumsum(lengths) - lengths
            owners = np.repeat(np.arange(len(lengths)), lengths)
            num_times = np.array([pattern.num_times for pattern in self.patterns], np.int64)
            self._table = PatternTable(
                num_times=num_times,
                one_time=bool((num_times == 1).all()),
                num_values=np.array([pattern.num_values for pattern in self.patterns], np.int64),
                shared=np.array([pattern.shared for pattern in self.patterns], np.bool_),
                members=np.fromiter((id for pattern in self.patterns for id in pattern.layouts), np.int64, len(owners)),
                owners=owners,
                positions=np.arange(len(owners)) - starts[owners],
            )
        return self._table

    def _pattern(self, shared: bool, layouts: list[int]) -> Pattern:
        for id in layouts:
            if not 0 <= id < len(self.layouts):
                raise RunError(f"pattern {len(self.patterns)} is damaged: there is no layout {id}")
        num_values = sum(self.layouts[id].num_scopes for id in layouts)
        if num_values > _MOST_VALUES:
            raise RunError(f"pattern {len(self.patterns)} is damaged: it has {num_values} values")
        return Pattern(tuple(layouts), shared, num_values)
