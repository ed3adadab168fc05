"""What a prescription is, and what all of them ask of a run.

A prescription is a function from a finding, the history and what is known of the run to a remedy with its numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from forewarn.judge.history import History
from forewarn.types import Finding, FrozenCause, Remedy, RunInfo

Prescription = Callable[[Finding, History, RunInfo], Remedy | None]
"""A remedy without its numbers yet; None where it makes no sense for this finding."""

Numbers = dict[str, float | str]


STEPS = ("total_steps", "max_steps")
"""Under which names the steps of the whole run are declared."""


def advise(
    action: str, why: str, *, scope_is: str = "", safety: str = "notify", **numbers: float | str
) -> Prescription:
    """Something to do, with the step of the finding and, under the name `scope_is`, its scope."""

    def prescribe(finding: Finding, history: History, info: RunInfo) -> Remedy:
        known: Numbers = {scope_is: finding.scope} if scope_is and finding.scope else {}
        return Remedy(action, {**known, **numbers, "step": finding.step}, why, safety)

    return prescribe


def for_cause(cause: FrozenCause, prescription: Prescription) -> Prescription:
    """The prescription where the evidence names this cause, nothing elsewhere."""

    def prescribe(finding: Finding, history: History, info: RunInfo) -> Remedy | None:
        return prescription(finding, history, info) if finding.evidence.get("cause") == cause.name.lower() else None

    return prescribe


def current_lr(history: History, info: RunInfo | None = None) -> float:
    """The largest learning rate of all parameter groups now; before the first step, that at attach time; else NaN."""
    last = history.panel("train/lr").last
    if len(last) and not np.isnan(last).all():
        return float(np.nanmax(last))
    return max((group["lr"] for group in info.groups if "lr" in group), default=math.nan) if info else math.nan


def declared(info: RunInfo, *names: str) -> float:
    """The first of these that the user declared as a number; NaN if none is."""
    return next((value for name in names if not math.isnan(value := _number(info, name))), math.nan)


def _number(info: RunInfo, name: str) -> float:
    value = info.hyperparameters.get(name)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else math.nan


def scaled(now: float, factor: float) -> Numbers:
    return {"factor": factor} if math.isnan(now) else {"from": now, "to": now * factor}


def beta2(info: RunInfo, default: float) -> float:
    return max((group["beta2"] for group in info.groups if "beta2" in group), default=default)
