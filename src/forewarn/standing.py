"""How a run stands, in the words that every view, command and check uses."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable

from forewarn.types import Alert, AlertState, Severity, counted

HEALTHY, WARNINGS, CRITICAL = 0, 1, 2
VERDICTS = ("healthy", "warnings", "critical")
"""A run in a word, by its exit code."""
NOT_FALLING = "no warnings, but the loss is not falling"
"""The verdict on a run without warnings that learns nothing: it is not called healthy."""
TOO_EARLY = "too early to tell"
NO_ALERTS = "no alerts"
RUNNING, COMPLETED, FAILED, INTERRUPTED = "running", "completed", "failed", "interrupted"
SILENT_SECONDS = 600.0
"""Seconds without a new record after which a run that was not closed counts as killed."""


def exit_code(alerts: Iterable[Alert]) -> int:
    """0 healthy, 1 warnings, 2 critical, by what still fires at the last step.

    An alert that was resolved counts one level lower: critical as a warning, a warning as nothing. Information alone is
    healthy.
    """
    levels = (alert.severity - (alert.state is AlertState.RESOLVED) for alert in alerts)
    return {Severity.CRITICAL: CRITICAL, Severity.WARNING: WARNINGS}.get(Severity(max([1, *levels])), HEALTHY)


def verdict(alerts: Iterable[Alert], is_falling: bool | None) -> str:
    """A run in a few words, live and in `check`; `is_falling` is about its loss, None if that cannot be told."""
    code = exit_code(alerts)
    return NOT_FALLING if code == HEALTHY and is_falling is False else VERDICTS[code]


def open_alerts(alerts: Iterable[Alert]) -> list[Alert]:
    """Those that still fire."""
    return [alert for alert in alerts if alert.state is AlertState.FIRING]


def open_words(alerts: Iterable[Alert]) -> str:
    """`2 warnings open`, or that there are no alerts."""
    words = counted(open_alerts(alerts))
    return f"{words} open" if words else NO_ALERTS


def alert_words(alerts: Iterable[Alert]) -> str:
    """`2 warnings open, 1 critical resolved`, or that there are no alerts."""
    alerts = list(alerts)
    resolved = counted([alert for alert in alerts if alert.state is AlertState.RESOLVED])
    words = [open_words(alerts)] if open_alerts(alerts) or not resolved else []
    return ", ".join([*words, f"{resolved} resolved"] if resolved else words)


def run_state(end: str | None, updated: float) -> str:
    """running, completed, failed (an error ended it) or interrupted (stopped by hand, or killed).

    `end` is why the run ended, None if it was not closed; `updated` is when it last recorded something.
    """
    if end is None:
        return INTERRUPTED if time.time() - updated > SILENT_SECONDS else RUNNING
    if end.startswith(("KeyboardInterrupt", "interrupted", "SystemExit")):
        return INTERRUPTED
    return FAILED if re.match(r"[A-Z]\w*(: |$)", end) else COMPLETED  # `ValueError: …`; all else is a reason to stop
