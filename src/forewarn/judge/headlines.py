"""A finding in words, from the message of its rule. Every view shows the same sentence."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from string import Formatter
from typing import NamedTuple

from forewarn.types import BatchNormState, Finding, FrozenCause, RunInfo, figure

SEPARATOR = " · "
LEAST_PERCENT = 0.001
"""Smallest percentage that is told as a number."""
MOST_TIMES = 1e6
"""Largest factor that is told as a number."""
LONGEST_NAME = 80
"""Maximum length of a name; longer ones are cut in the middle, which says least."""


class Message(NamedTuple):
    """What a rule says about a finding: templates over its value, bound, scope and evidence.

    `{value:%}` is a percentage, `{value:×}` a factor, `{cause:words}` the words of an enum member. `{scope}` is a layer
    or parameter by name, `{group}` a group of the optimizer by number.
    """

    headline: str
    """What happened, in about 50 characters and without a full stop."""
    numbers: str = ""
    """Quantities, each with its name: `loss {value} · limit {bound} · usual {level}`. Unknown ones are left out."""
    cause: str = ""
    """Why it happened, if the evidence tells."""

    @property
    def keys(self) -> set[str]:
        """The names of the values in its templates."""
        return {name for template in self for _, name, _, _ in Formatter().parse(template) if name is not None}


class Telling(NamedTuple):
    """A message filled in."""

    headline: str
    numbers: str
    cause: str
    place: str = ""
    """The scope as a person would name it; empty for the run as a whole."""


def tell(messages: Sequence[Message], finding: Finding, info: RunInfo | None = None) -> Telling:
    """A finding in words, by the first message for which it has all values, or else the last."""
    figures: dict[str, float | str] = {"value": finding.value, "bound": finding.bound}
    if finding.scope:
        figures |= {"scope": place(finding.scope, info), "group": finding.scope}
    for key, value in finding.evidence.items():
        figures[key] = place(value, info) if isinstance(value, str) and key != "group" else value
    message = next((candidate for candidate in messages if candidate.keys <= figures.keys()), messages[-1])
    numbers = [part for part in message.numbers.split(SEPARATOR) if _is_known(part, figures)]
    figures = dict.fromkeys(message.keys, math.nan) | {"scope": "the model"} | figures
    return Telling(
        filled(message.headline, figures),
        filled(SEPARATOR.join(numbers), figures),
        filled(message.cause, figures),
        place(finding.scope, info),
    )


def filled(template: str, figures: Mapping[str, float | str]) -> str:
    """A template, filled in with numbers and names as in a message."""
    return template.format_map(
        {key: _Name(value) if isinstance(value, str) else _Figure(value) for key, value in figures.items()}
    )


def place(scope: str, info: RunInfo | None = None) -> str:
    """A scope as a person would name it: `2.weight` is `layer 2 (Linear) weight`, other names stay as they are."""
    match = re.fullmatch(r"(\d+(?:\.\d+)*)(?:\.(weight|bias))?", scope)
    if match is None or info is None or match[1] not in info.modules:
        return cut(scope)
    return f"layer {match[1]} ({info.modules[match[1]]})" + (f" {match[2]}" if match[2] else "")


def cut(name: str) -> str:
    """A name, cut in the middle if it is long."""
    half = LONGEST_NAME // 2
    return name if len(name) <= LONGEST_NAME else f"{name[:half]}…{name[-half:]}"


class _Figure(float):
    """A number in a message."""

    def __format__(self, spec: str) -> str:
        if spec == "%":
            return f"less than {LEAST_PERCENT:g}%" if 0 < 100 * self < LEAST_PERCENT else f"{figure(100 * self)}%"
        if spec == "×":
            return "over a million×" if MOST_TIMES < self < math.inf else f"{figure(float(self))}×"
        return figure(float(self))


class _Name(str):
    """A name in a message."""

    __slots__ = ()

    def __format__(self, spec: str) -> str:
        return in_its_words(self) if spec == "words" else str(self)


def in_its_words(member: str) -> str:
    """The words of the enum member with this lower-case name; other names without their underscores."""
    for kind in (FrozenCause, BatchNormState):
        if member.upper() in kind.__members__:
            return str(kind[member.upper()])
    return member.replace("_", " ")


def _is_known(part: str, values: Mapping[str, float | str]) -> bool:
    """Whether every number in this part is known; `value` itself may be NaN."""
    names = [name for _, name, _, _ in Formatter().parse(part) if name is not None]
    return all(name in values and (name == "value" or values[name] == values[name]) for name in names)
