"""Findings, alerts and actions as JSON, and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from forewarn.codec import Noun
from forewarn.store.errors import RunError
from forewarn.store.plain import decoded, encoded
from forewarn.types import Action, Alert, Finding

INSERT_RECORD = "INSERT INTO records (time, step, kind, body) VALUES (?, ?, ?, ?)"
INSERT_EVENT = "INSERT INTO events (time, kind, data) VALUES (?, ?, ?)"

Record = Finding | Alert | Action
T = TypeVar("T", bound=Noun)


@dataclass(frozen=True, slots=True)
class Event(Noun):
    """Something that happened to the run itself, such as its end."""

    time: float
    """Seconds since the epoch."""
    kind: str
    data: Mapping[str, float | str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Change:
    """An alert as it stood when its state or severity changed."""

    time: float
    """Seconds since the epoch."""
    step: int
    alert: Alert


def to_text(record: Record) -> str:
    return encoded(record.to_json(enums=int))


def from_text(kind: type[T], text: str) -> T:
    return _read(kind, _decoded(text))


def event_from(time: float, kind: str, text: str) -> Event:
    return _read(Event, {"time": time, "kind": kind, "data": _decoded(text)})


def _read(kind: type[T], plain: Any) -> T:
    try:
        return kind.from_json(plain)
    except ValueError as error:
        raise RunError(f"a record cannot be read: {error}; the database is damaged") from error


def _decoded(text: Any) -> Any:
    try:
        return decoded(text)
    except (TypeError, ValueError) as error:
        raise RunError(f"a record is not JSON ({error}); the database is damaged") from error
