"""What a preflight found: a checklist with numbers, the curve of learning rates, and an exit code."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any


class State(StrEnum):
    """What a check came to."""

    PASS = "pass"
    LOOK = "look"
    """Something to look at before a long run."""
    FAIL = "fail"
    """The model will not train like this."""
    UNKNOWN = "unknown"
    """It does not apply, or could not be checked."""
    INFO = "info"
    """A number that is neither good nor bad."""


@dataclass(frozen=True, slots=True)
class PreflightCheck:
    """One point of the checklist."""

    name: str
    state: State
    detail: str
    """The numbers behind the state, in words."""
    advice: str = ""
    """What to do, as a sentence without a period; empty if there is nothing to do."""
    numbers: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RateCurve:
    """The loss over an exponential sweep of the learning rate."""

    rates: tuple[float, ...]
    """The highest learning rate of all groups at each step; the others keep their ratio to it."""
    losses: tuple[float, ...]
    """The loss at each step, without the differences between batches, smoothed."""
    present: float
    """The learning rate of the optimizer, or the peak of its schedule."""
    suggested: float = math.nan
    """NaN if no rate is clearly better than others."""
    limit: float = math.nan
    """The lowest rate at which the loss rises again; NaN if it does not."""
    lowest: float = math.nan
    """The lowest loss of any batch in the sweep."""


@dataclass(frozen=True, slots=True)
class Preflight:
    """The result of `forewarn.preflight`. Printed, it is the checklist."""

    model: str
    checks: tuple[PreflightCheck, ...]
    curve: RateCurve | None = None

    @property
    def exit_code(self) -> int:
        """0 fine, 1 something to look at, 2 will not train."""
        states = {check.state for check in self.checks}
        return 2 if State.FAIL in states else 1 if State.LOOK in states else 0

    @property
    def verdict(self) -> str:
        return ("ready to train", "something to look at", "will not train")[self.exit_code]

    @property
    def suggested_lr(self) -> float | None:
        """The suggested learning rate of the group with the highest one; None if there is no clear one."""
        if self.curve is None or not math.isfinite(self.curve.suggested):
            return None
        return self.curve.suggested

    def check(self, name: str) -> PreflightCheck:
        """One check by its name."""
        for check in self.checks:
            if check.name == name:
                return check
        raise KeyError(f"there is no check {name!r}; choose from {', '.join(check.name for check in self.checks)}")

    def to_json(self) -> dict[str, Any]:
        """Everything as plain values."""
        return {
            "model": self.model,
            "verdict": self.verdict,
            "exit_code": self.exit_code,
            "suggested_lr": self.suggested_lr,
            "checks": [asdict(check) | {"state": str(check.state)} for check in self.checks],
            "curve": None if self.curve is None else asdict(self.curve),
        }

    def __str__(self) -> str:
        from forewarn.preflight_checks.screen import as_plain_text

        return as_plain_text(self)
