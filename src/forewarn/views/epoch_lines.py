"""Alerts about epochs as lines of text."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from forewarn.judge.families import Family
from forewarn.judge.rules import family_of
from forewarn.types import Alert
from forewarn.views.wording import STYLES, AlertGroup, advice, mark


def advice_lines(alerts: Sequence[Alert]) -> list[Text]:
    """Each alert about epochs with its remedies, including notes, whose advice no other view shows.

    A remedy for several of them is shown once.
    """
    lines: list[Text] = []
    shown: set[str] = set()
    for alert in alerts:
        if family_of(alert.code) is not Family.EVALUATION:
            continue
        group = AlertGroup((alert,))
        lines.append(Text.assemble((f"  {mark(alert.severity)}", STYLES[alert.severity]), f" {group.headline}"))
        lines += [Text(f"    {group.numbers}", style="dim")] if group.numbers else []
        remedies = [remedy for remedy in alert.remedies if remedy.do not in shown]
        shown |= {remedy.do for remedy in remedies}
        lines += [Text(f"    {rank}. ") + advice(remedy) for rank, remedy in enumerate(remedies, 1)]
    return lines
