"""Alerts in words: grouped by code, with numbers, and with names that are safe to print."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from forewarn.types import Action, Alert, AlertState, Finding, Remedy, Severity, in_words

LONGEST_NAME = 80
"""Longest name; longer ones are cut in the middle, where they say least."""

STYLES = {Severity.INFO: "cyan", Severity.WARNING: "yellow", Severity.CRITICAL: "bold red"}


def literal(text: str) -> str:
    """Text that is safe to print: control characters are escaped."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def short(name: str) -> str:
    """A name made literal, and cut in the middle if it is long."""
    name, half = literal(name), LONGEST_NAME // 2
    return name if len(name) <= LONGEST_NAME else f"{name[:half]}…{name[-half:]}"


@dataclass(frozen=True, slots=True)
class AlertGroup:
    """All alerts of one code: the same thing wrong in one or many places."""

    alerts: tuple[Alert, ...]

    @property
    def worst(self) -> Alert:
        """Firing before resolved, then the most severe, then the furthest beyond its bound."""
        return max(self.alerts, key=_weight)

    @property
    def title(self) -> str:
        return f"{short(self.alerts[0].name)} ({short(self.alerts[0].code)})"

    @property
    def place(self) -> str:
        """The only scope, or their number and the worst; empty if it is about the run as a whole."""
        scopes = {alert.scope for alert in self.alerts}
        worst = self.worst.scope
        if len(scopes) == 1:
            return f"in {short(worst)}" if worst else ""
        if not worst:
            return f"in the run as a whole and in {len(scopes) - 1} {'place' if len(scopes) == 2 else 'places'}"
        return f"in {len(scopes)} places, worst {short(worst)}"

    @property
    def where(self) -> str:
        """The title and the place."""
        return f"{self.title} {self.place}".rstrip()

    @property
    def is_firing(self) -> bool:
        return any(alert.state is AlertState.FIRING for alert in self.alerts)


def grouped(alerts: Iterable[Alert]) -> list[AlertGroup]:
    """Alerts by code, in the order in which the codes first appear."""
    by_code: dict[str, list[Alert]] = {}
    for alert in alerts:
        by_code.setdefault(alert.code, []).append(alert)
    return [AlertGroup(tuple(members)) for members in by_code.values()]


def news_of(alert: Alert) -> Finding:
    """The finding with which the alert fired or last got worse; before that, the newest finding."""
    return alert.announced or alert.finding


def numbers(finding: Finding, most: int | None = None) -> str:
    """The value, its bound and the evidence, or the first of it: `9.1 (bound 2.3), level 2.1, ratio 4.3`."""
    parts = [] if math.isnan(finding.bound) else [f"{in_words(finding.value)} (bound {in_words(finding.bound)})"]
    for name, value in list(finding.evidence.items())[:most]:
        parts.append(f"{literal(name).replace('_', ' ')} {literal(in_words(value))}")
    return ", ".join(parts)


def advice(remedy: Remedy) -> str:
    """What to do and why, on one line."""
    return f"{literal(str(remedy))}: {literal(remedy.why)}"


def deed(action: Action) -> str:
    """The action taken and the alert that caused it."""
    applied = literal(str(Remedy(action.action, action.parameters, "")))
    return f"{applied}, because of {literal(action.code)}" + (f" in {short(action.scope)}" if action.scope else "")


def _weight(alert: Alert) -> tuple[bool, Severity, float, float]:
    """Orders alerts of one code; how far a value lies beyond its bound counts in either direction."""
    value, bound = abs(news_of(alert).value), abs(news_of(alert).bound)
    if not math.isfinite(value):
        value = excess = math.inf
    else:
        excess = abs(math.log(value / bound)) if value and bound else math.inf
    return (alert.state is AlertState.FIRING, alert.severity, excess, value)
