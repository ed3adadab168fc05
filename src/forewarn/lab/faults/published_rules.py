"""The published rules of others, judged from the readings of the same runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from forewarn.codec import Noun
from forewarn.store.reader import Run


@dataclass(frozen=True, slots=True)
class Remark(Noun):
    """The first warning of a published rule about a run."""

    rule: str
    step: int
    what: str


@dataclass(frozen=True, slots=True)
class PublishedRule:
    """A rule set of another project at its published defaults."""

    name: str
    first_remark: Callable[[Run], Remark | None]


PUBLISHED: tuple[PublishedRule, ...] = ()
