"""The status of a run, in the words that all views and commands share."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable

from forewarn.types import Alert, AlertState, Severity, counted

HEALTHY, WARNINGS, CRITICAL = 0, 1, 2
VERDICTS = ("healthy", "warnings", "critical")
"""The verdict by exit code."""
NOT_FALLING = "no warnings, but the loss is not falling"
"""The verdict on a run that has no warnings but learns nothing."""
NO_LOSS = "no training loss to judge"
"""The verdict on an imported run without warnings whose log has no training loss: that is not healthy."""
UNCERTAIN = (NOT_FALLING, NO_LOSS)
"""Verdicts on runs without warnings that may be bad all the same."""
RECOVERED = "recovered"
"""The verdict on a run whose warnings are all resolved and whose loss has fallen."""
TOO_EARLY = "too early to tell"
NO_ALERTS = "no alerts"
RUNNING, STALLED, COMPLETED, FAILED, INTERRUPTED = "running", "stalled", "completed", "failed", "interrupted"
IMPORTED = "imported"
"""The state of a run that was read from another tool's log; how its training ended is unknown."""
_NEVER_CLOSED = ("not closed", "not started")
"""What is recorded for a run that the program left without closing it."""
_EXCEPTION = re.compile(r"[\w.]*(Error|Exception|Failure)\b")
"""The name of an exception that ended a run; any other reason is one for which somebody stopped it."""
STALLED_SECONDS, SILENT_SECONDS = 300.0, 600.0
"""Seconds without a new record after which a run that was not closed counts as stalled, and as killed."""


def exit_code(alerts: Iterable[Alert], is_falling: bool | None = None) -> int:
    """0 healthy, 1 warnings, 2 critical, by the alerts still open at the last step.

    A resolved alert counts one level lower: critical as a warning, a warning as nothing. If the loss has not fallen, or
    has lost most of its fall, a resolved warning stays a warning: the run is worse for it. A run with only notes is
    healthy.
    """
    alerts = list(alerts)
    levels = (alert.severity - (alert.state is AlertState.RESOLVED) for alert in alerts)
    worst = Severity(max([1, *levels]))
    if is_falling is False and any(alert.severity > Severity.INFO for alert in alerts):
        worst = max(worst, Severity.WARNING)
    return {Severity.CRITICAL: CRITICAL, Severity.WARNING: WARNINGS}.get(worst, HEALTHY)


def verdict(alerts: Iterable[Alert], is_falling: bool | None, *, has_loss: bool = True) -> str:
    """The verdict on a run, live and in `check`. `is_falling` is about its loss; None if unknown."""
    alerts = list(alerts)
    code = exit_code(alerts, is_falling)
    if code == HEALTHY and any(alert.severity > Severity.INFO for alert in alerts):
        return RECOVERED
    if code == HEALTHY and not has_loss:
        return NO_LOSS
    return NOT_FALLING if code == HEALTHY and is_falling is False else VERDICTS[code]


def open_alerts(alerts: Iterable[Alert]) -> list[Alert]:
    """The alerts that are still open."""
    return [alert for alert in alerts if alert.state is AlertState.FIRING]


def open_words(alerts: Iterable[Alert]) -> str:
    """`2 warnings open`, or `no alerts`."""
    words = counted(open_alerts(alerts))
    return f"{words} open" if words else NO_ALERTS


def alert_words(alerts: Iterable[Alert]) -> str:
    """`2 warnings open, 1 critical resolved`, or `no alerts`."""
    alerts = list(alerts)
    resolved = counted([alert for alert in alerts if alert.state is AlertState.RESOLVED])
    words = [open_words(alerts)] if open_alerts(alerts) or not resolved else []
    return ", ".join([*words, f"{resolved} resolved"] if resolved else words)


def run_state(end: str | None, updated: float) -> str:
    """running, stalled (silent for minutes), completed, failed (by an error) or interrupted (by hand, or killed).

    `end` is why the run ended, None if it was not closed; `updated` is when it last recorded something.
    """
    if end is None:
        silence = time.time() - updated
        return INTERRUPTED if silence > SILENT_SECONDS else STALLED if silence > STALLED_SECONDS else RUNNING
    if end == IMPORTED:
        return IMPORTED
    if end.startswith(("KeyboardInterrupt", "interrupted", "SystemExit")):
        return INTERRUPTED
    return FAILED if end in _NEVER_CLOSED or _EXCEPTION.match(end) else COMPLETED
