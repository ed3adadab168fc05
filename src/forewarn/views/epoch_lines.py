"""Alerts about epochs as lines of text."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from forewarn.judge.families import Family
from forewarn.judge.rules import family_of
from forewarn.types import Alert
from forewarn.views.wording import STYLES, advice, numbers

MOST_REMEDIES = 3
MOST_NUMBERS = 2


def advice_lines(alerts: Sequence[Alert]) -> list[Text]:
    """Each alert about epochs with its first remedies; also for information, where no other view says what to do."""
    lines: list[Text] = []
    for alert in alerts:
        if family_of(alert.code) is not Family.EVALUATION:
            continue
        words = f" {alert.name} ({alert.code}): {numbers(alert.finding, MOST_NUMBERS)}"
        lines.append(Text.assemble("  ", (str(alert.severity), STYLES[alert.severity]), words))
        remedies = enumerate(alert.remedies[:MOST_REMEDIES], 1)
        lines += [Text(f"    {rank}. {advice(remedy)}") for rank, remedy in remedies]
    return lines
