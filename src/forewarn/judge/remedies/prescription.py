"""Prescriptions, and the facts about a run that they share.

A prescription turns a finding, the history and the facts of a run into a remedy with its numbers filled in.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from forewarn.judge.headlines import filled, place
from forewarn.judge.history import History
from forewarn.types import Finding, FrozenCause, Remedy, RunInfo

Prescription = Callable[[Finding, History, RunInfo], Remedy | None]
"""Makes a remedy; None if it does not apply to this finding."""

Numbers = dict[str, float | str]


STEPS = ("total_steps", "max_steps")
"""Names under which the total number of steps is declared."""


def advise(
    action: str, do: str, why: str, *, scope_is: str = "", safety: str = "notify", **numbers: float | str
) -> Prescription:
    """Advice with the step of the finding and, under the name `scope_is`, its scope.

    `do` is an instruction without a full stop, filled in with these numbers and the evidence, such as
    `Look at the batch of step {step}`. `why` is the reason: another sentence, also without a full stop.
    """

    def prescribe(finding: Finding, history: History, info: RunInfo) -> Remedy:
        named_scope: Numbers = {scope_is: finding.scope} if scope_is and finding.scope else {}
        parameters: Numbers = {**named_scope, **numbers, "step": finding.step}
        figures = {"scope": place(finding.scope, info) or "the model", **finding.evidence, **parameters}
        return Remedy(action, parameters, why, safety, filled(do, figures))

    return prescribe


def for_cause(cause: FrozenCause, prescription: Prescription) -> Prescription:
    """The prescription, only for findings whose evidence names this cause."""

    def prescribe(finding: Finding, history: History, info: RunInfo) -> Remedy | None:
        return prescription(finding, history, info) if finding.evidence.get("cause") == cause.name.lower() else None

    return prescribe


def current_lr(history: History, info: RunInfo | None = None) -> float:
    """The largest current learning rate of any parameter group; before the first step, the initial one; else NaN."""
    last = history.panel("train/lr").last
    if len(last) and not np.isnan(last).all():
        return float(np.nanmax(last))
    return max((group["lr"] for group in info.groups if "lr" in group), default=math.nan) if info else math.nan


def declared(info: RunInfo, *names: str) -> float:
    """The first of these hyperparameters declared as a number; NaN if there is none."""
    return next((value for name in names if not math.isnan(value := _number(info, name))), math.nan)


def _number(info: RunInfo, name: str) -> float:
    value = info.hyperparameters.get(name)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else math.nan


def scaled(now: float, factor: float) -> Numbers:
    return {"factor": factor} if math.isnan(now) else {"from": now, "to": now * factor}


def change(verb: str, quantity: str, numbers: Numbers) -> str:
    """A change in words: `Lower the learning rate from 0.1 to 0.05`, or `Multiply the learning rate by 0.5`."""
    if "from" in numbers:
        return f"{verb} {quantity} {filled('from {from} to {to}', numbers)}"
    return f"Multiply {quantity} {filled('by {factor}', numbers)}"


def beta2(info: RunInfo, default: float) -> float:
    return max((group["beta2"] for group in info.groups if "beta2" in group), default=default)
