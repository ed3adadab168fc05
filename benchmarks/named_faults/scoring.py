"""Remarks of a tool, and the one rule that turns them into a verdict for every tool."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["names the cause", "warns, other words", "silent", "not its job"]

MEANINGS: dict[Verdict, str] = {
    "names the cause": "a warning that the healthy twin does not get matches the fault's pattern.",
    "warns, other words": "the tool gives such a warning, but none that matches: it tells a symptom.",
    "silent": "no warning, or only kinds of warning that the healthy twin gets too.",
    "not its job": "the tool records and draws what happens, and leaves the judgement to you.",
}


@dataclass(frozen=True, slots=True)
class Remark:
    """One warning as the tool worded it, with its advice."""

    kind: str
    """The check that speaks and its severity, without layer names and numbers."""
    text: str
    """What counts: the name of the check, its headline and summary, its cause if it gives one, its first advice."""
    more: str = ""
    """Its longer explanation and further advice, which list possible causes and read the same in every run."""


@dataclass(frozen=True, slots=True)
class Said:
    """What one tool said about one run."""

    remarks: tuple[Remark, ...]
    report: str
    """Its whole report, verbatim."""
    console: str
    """Everything the process printed, verbatim."""


def told_apart(broken: Sequence[Remark], healthy: Sequence[Remark]) -> list[Remark]:
    """The warnings of the broken run of a kind that its healthy twin does not get."""
    usual = {remark.kind for remark in healthy}
    return [remark for remark in broken if remark.kind not in usual]


def matches(pattern: str, text: str) -> bool:
    """Whether a text matches the pattern of a fault, upper and lower case alike."""
    return re.search(pattern, text, re.IGNORECASE) is not None


def naming(pattern: str, remarks: Sequence[Remark]) -> list[Remark]:
    """The remarks that match the pattern of a fault."""
    return [remark for remark in remarks if matches(pattern, remark.text)]


def verdict(pattern: str, broken: Sequence[Remark], healthy: Sequence[Remark]) -> Verdict:
    """How well a tool that judges told a broken run from its healthy twin."""
    new = told_apart(broken, healthy)
    if naming(pattern, new):
        return "names the cause"
    return "warns, other words" if new else "silent"


def mentioned(pattern: str, broken: Sequence[Remark], healthy: Sequence[Remark]) -> bool:
    """Whether only the longer text of a warning matches: the cause is one of several that it lists."""
    new = told_apart(broken, healthy)
    return not naming(pattern, new) and any(matches(pattern, remark.more) for remark in new)


def telling(pattern: str, broken: Sequence[Remark], healthy: Sequence[Remark]) -> list[Remark]:
    """What to quote: a remark that names the fault, else the first two kinds that the twin does not get."""
    new = told_apart(broken, healthy)
    kinds = {remark.kind: remark for remark in reversed(new)}
    first = [remark for remark in new if kinds[remark.kind] is remark]
    return naming(pattern, new)[:1] or first[:2]
