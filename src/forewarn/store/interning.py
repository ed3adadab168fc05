"""Numbers for layouts and patterns. The scopes of a metric are written once, and rows refer to them by number."""

from __future__ import annotations

import sqlite3
from typing import Any

import numpy as np

from forewarn.store.catalog import LAYOUT_IDS, Catalog
from forewarn.store.plain import encoded, storable

_MOST_IDENTITIES = 4096
"""Maximum entries in the cache by identity, for callers that build a new tuple of scopes on every step."""


class Interning:
    """Assigns numbers to layouts and patterns, and remembers which are not written yet."""

    def __init__(self) -> None:
        self._news: list[tuple[str, tuple[Any, ...]]] = []
        self._scopes: dict[tuple[str, ...], int] = {}
        self._layouts: dict[tuple[str, tuple[str, ...]], int] = {}
        self._patterns: dict[tuple[bool, tuple[int, ...]], int] = {}
        self._by_identity: dict[tuple[str, int], tuple[int, tuple[str, ...]]] = {}

    def load(self, connection: sqlite3.Connection) -> None:
        """Load the numbers that a resumed run already uses."""
        catalog = Catalog()
        catalog.refresh(connection)
        for layout in catalog.layouts:
            self._layouts[layout.name, catalog.scopes_of(layout, connection)] = layout.id
        for (number,) in connection.execute("SELECT id FROM scopes").fetchall():
            self._scopes[catalog.scopes_by(number, "a metric", connection)] = number
        for number, pattern in enumerate(catalog.patterns):
            self._patterns[pattern.shared, pattern.layouts] = number

    def layout(self, name: str, scopes: tuple[str, ...]) -> int:
        """The number of a layout. A tuple seen before is found by identity, without comparing its scopes."""
        entry = self._by_identity.get((name, id(scopes)))
        if entry is not None:
            return entry[0]
        number = self._layouts.get((name, scopes))
        if number is None:
            number = self._new_layout(name, scopes)
        if len(self._by_identity) >= _MOST_IDENTITIES:
            self._by_identity.clear()
        self._by_identity[name, id(scopes)] = number, scopes  # keeping the tuple prevents reuse of its id
        return number

    def pattern(self, shared: bool, layouts: tuple[int, ...]) -> int:
        number = self._patterns.get((shared, layouts))
        if number is None:
            number = self._patterns[shared, layouts] = len(self._patterns)
            packed = np.array(layouts, LAYOUT_IDS).tobytes()
            self._news.append(("INSERT INTO patterns (id, shared, layouts) VALUES (?, ?, ?)", (number, shared, packed)))
        return number

    def news(self) -> list[tuple[str, tuple[Any, ...]]]:
        """The statements, with parameters, that write new numbers; each is returned once."""
        news, self._news = self._news, []
        return news

    def scopes(self, scopes: tuple[str, ...]) -> int:
        """The number of a tuple of scopes."""
        number = self._scopes.get(scopes)
        if number is None:
            number = self._scopes[scopes] = 1 + max(self._scopes.values(), default=-1)
            self._news.append(("INSERT INTO scopes (id, names) VALUES (?, ?)", (number, encoded(scopes))))
        return number

    def _new_layout(self, name: str, scopes: tuple[str, ...]) -> int:
        scopes_id = self.scopes(scopes)
        number = self._layouts[name, scopes] = len(self._layouts)
        insertion = "INSERT INTO layouts (id, name, scopes, num_scopes) VALUES (?, ?, ?, ?)"
        self._news.append((insertion, (number, storable(name), scopes_id, len(scopes))))
        return number
