"""Findings, alerts and actions as JSON, and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from forewarn.store.errors import RunError
from forewarn.store.plain import decoded, encoded
from forewarn.types import Action, Alert, AlertState, Finding, Remedy, Severity

Record = Finding | Alert | Action


@dataclass(frozen=True, slots=True)
class Event:
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


def to_json(record: Record) -> str:
    if isinstance(record, Alert):
        plain = _fields(record)
        plain["finding"] = _fields(record.finding)
        plain["announced"] = None if record.announced is None else _fields(record.announced)
        plain["remedies"] = [_fields(one) for one in record.remedies]
        return encoded(plain)
    return encoded(_fields(record))


def finding_from(text: str) -> Finding:
    return _finding(_object(text))


def action_from(text: str) -> Action:
    plain = _object(text)
    return Action(
        step=_take(plain, "step", int),
        code=_take(plain, "code", str),
        scope=_take(plain, "scope", str),
        action=_take(plain, "action", str),
        parameters=_readings(plain, "parameters"),
    )


def alert_from(text: str) -> Alert:
    plain = _object(text)
    fired, announced = plain.get("fired"), plain.get("announced")
    return Alert(
        code=_take(plain, "code", str),
        name=_take(plain, "name", str),
        scope=_take(plain, "scope", str),
        severity=_severity(plain),
        state=_state(plain),
        since=_take(plain, "since", int),
        fired=None if fired is None else _take(plain, "fired", int),
        last=_take(plain, "last", int),
        finding=_finding(_take(plain, "finding", dict)),
        remedies=tuple(_remedy(one) for one in _take(plain, "remedies", list)),
        announced=None if announced is None else _finding(_take(plain, "announced", dict)),
    )


def event_from(time: float, kind: str, text: str) -> Event:
    return Event(float(time), str(kind), _readings({"data": _object(text)}, "data"))


def _finding(plain: dict[str, Any]) -> Finding:
    return Finding(
        code=_take(plain, "code", str),
        scope=_take(plain, "scope", str),
        step=_take(plain, "step", int),
        severity=_severity(plain),
        value=_take(plain, "value", float),
        bound=_take(plain, "bound", float),
        evidence=_readings(plain, "evidence"),
    )


def _remedy(plain: Any) -> Remedy:
    if not isinstance(plain, dict):
        raise RunError(f"a remedy was expected to be an object but is {plain!r:.80}; the database is damaged")
    return Remedy(
        action=_take(plain, "action", str),
        parameters=_readings(plain, "parameters"),
        why=_take(plain, "why", str),
        safety=_take(plain, "safety", str),
    )


def _fields(record: Any) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__dataclass_fields__}


def _object(text: Any) -> dict[str, Any]:
    try:
        plain = decoded(text)
    except (TypeError, ValueError) as error:
        raise RunError(f"a record is not JSON ({error}); the database is damaged") from error
    if not isinstance(plain, dict):
        raise RunError(f"a record was expected to be an object but is {plain!r:.80}; the database is damaged")
    return plain


def _take(plain: dict[str, Any], name: str, kind: type) -> Any:
    """The field `name`, which must be there and of that type; a whole number is a float too."""
    value = plain.get(name)
    if isinstance(value, kind) or (kind is float and isinstance(value, int)):
        return value
    raise RunError(f"{name} was expected to be {kind.__name__} but is {value!r:.80}; the database is damaged")


def _readings(plain: dict[str, Any], name: str) -> dict[str, float | str]:
    """The field `name`, whose values are numbers or words; anything else is shown as its text."""
    found = _take(plain, name, dict)
    return {key: value if isinstance(value, float | int | str) else str(value) for key, value in found.items()}


def _severity(plain: dict[str, Any]) -> Severity:
    try:
        return Severity(_take(plain, "severity", int))
    except ValueError as error:
        raise RunError(f"a severity is damaged or from a newer version ({error})") from error


def _state(plain: dict[str, Any]) -> AlertState:
    try:
        return AlertState(_take(plain, "state", int))
    except ValueError as error:
        raise RunError(f"a state is damaged or from a newer version ({error})") from error
