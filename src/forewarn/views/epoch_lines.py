"""Alerts about epochs as lines of text."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from forewarn.judge.families import Family
from forewarn.judge.rules import family_of
from forewarn.types import Alert
from forewarn.views.wording import STYLES, AlertGroup, advice, mark

MOST_REMEDIES = 3


def advice_lines(alerts: Sequence[Alert]) -> list[Text]:
    """Each alert about epochs with its first remedies, including notes, whose advice no other view shows."""
    lines: list[Text] = []
    for alert in alerts:
        if family_of(alert.code) is not Family.EVALUATION:
            continue
        group = AlertGroup((alert,))
        lines.append(Text.assemble((f"  {mark(alert.severity)}", STYLES[alert.severity]), f" {group.headline}"))
        lines += [Text(f"    {group.numbers}", style="dim")] if group.numbers else []
        remedies = enumerate(alert.remedies[:MOST_REMEDIES], 1)
        lines += [Text(f"    {rank}. ") + advice(remedy) for rank, remedy in remedies]
    return lines
