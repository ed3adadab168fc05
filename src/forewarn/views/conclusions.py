"""What a diagnosis comes to, in the words that the console, the dashboard, the report and a notebook share."""

from __future__ import annotations

from collections.abc import Iterable

from forewarn.judge.diagnosis import Diagnosis
from forewarn.standing import alert_words
from forewarn.types import AlertState, Remedy, Severity, in_words
from forewarn.views.wording import AlertGroup, grouped, with_symptoms

MOST_REMEDIES = 5
OPPOSITES = {"raise_lr": "lower_lr", "lower_lr": "raise_lr"}
"""Contradictory actions; only the more important one is shown."""


def summary_words(diagnosis: Diagnosis) -> str:
    """The alerts in one line, and in a healthy run the checks that are unusual."""
    words = alert_words(diagnosis.alerts)
    unusual = [f'"{check.name}"' for check in diagnosis.checklist if check.state == "notice"]
    return f"{words}; look at {', '.join(unusual)} below" if not diagnosis.exit_code and unusual else words


def folded(diagnosis: Diagnosis) -> list[tuple[AlertGroup, list[AlertGroup]]]:
    """Each kind of alert that is a root cause, with its symptoms; most important first."""
    return with_symptoms(diagnosis.ranked, diagnosis.causes)


def things_to_do(diagnosis: Diagnosis) -> list[Remedy]:
    """The remedies for what is wrong now, or else for what was, most important first; empty without warnings."""
    serious = [alert for alert in diagnosis.ranked if alert.severity > Severity.INFO]
    firing = [alert for alert in serious if alert.state is AlertState.FIRING]
    causes = {diagnosis.cause_of(alert) for alert in firing}
    present = [alert for alert in serious if alert.state is AlertState.FIRING or alert.code in causes]
    return remedies_of(grouped(present or serious))


def remedies_of(groups: Iterable[AlertGroup]) -> list[Remedy]:
    """The remedies for the worst alert of each kind; each action appears once."""
    ranked: dict[str, Remedy] = {}
    for group in groups:
        for remedy in group.worst.remedies:
            if OPPOSITES.get(remedy.action) not in ranked:
                ranked.setdefault(remedy.action, remedy)
    return list(ranked.values())[:MOST_REMEDIES]


def change_words(remedy: Remedy) -> str | None:
    """What a remedy changes: `0.03 → 0.001`; None if it names no values."""
    values = remedy.parameters
    return f"{in_words(values['from'])} → {in_words(values['to'])}" if {"from", "to"} <= values.keys() else None
