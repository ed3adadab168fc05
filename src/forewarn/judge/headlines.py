"""What a finding says in one sentence, from the message of its rule."""

from __future__ import annotations

import math
from collections.abc import Mapping
from string import Formatter

from forewarn.judge.registry import Rule
from forewarn.types import Finding


class _Figure(float):
    """A number in a message: three significant digits, unless the message says otherwise; `unknown` where it is NaN."""

    def __format__(self, spec: str) -> str:
        if math.isnan(self):
            return "unknown"
        if math.isinf(self):
            return "∞" if self > 0 else "-∞"
        if spec:
            return float.__format__(self, spec)
        if self.is_integer() and abs(self) < 1e6:
            return str(int(self))
        rounded = float(f"{float(self):.3g}")
        return (
            f"{rounded:.0f}" if 1e3 <= abs(rounded) < 1e6 else f"{rounded:g}".replace("e-0", "e-").replace("e+0", "e+")
        )


class _Name(str):
    """A name in a message; as `{cause:words}` the name of an enum member, without its underscores."""

    __slots__ = ()

    def __format__(self, spec: str) -> str:
        return self.replace("_", " ") if spec == "words" else str(self)


def headline(rule: Rule, finding: Finding) -> str:
    """One plain sentence about a finding: the first of the rule's messages whose keys the finding all has."""
    values = _values(finding)
    message = next((candidate for candidate in rule.messages if keys(candidate) <= values.keys()), rule.messages[-1])
    missing: dict[str, _Figure | _Name] = dict.fromkeys(keys(message), _Figure("nan"))
    return message.format_map({**missing, "scope": _Name("the model"), **values})


def keys(message: str) -> set[str]:
    """What a message is filled in with."""
    return {name for _, name, _, _ in Formatter().parse(message) if name is not None}


def _values(finding: Finding) -> Mapping[str, _Figure | _Name]:
    numbers: dict[str, float | str] = {**finding.evidence, "value": finding.value, "bound": finding.bound}
    if finding.scope:
        numbers["scope"] = finding.scope
    return {name: _Name(value) if isinstance(value, str) else _Figure(value) for name, value in numbers.items()}
