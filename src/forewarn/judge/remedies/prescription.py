"""Prescriptions, and the facts about a run that they share.

A prescription is a function from a finding, the history and the run's information to a remedy with its numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from forewarn.judge.headlines import filled, place
from forewarn.judge.history import History
from forewarn.types import Finding, FrozenCause, Remedy, RunInfo

Prescription = Callable[[Finding, History, RunInfo], Remedy | None]
"""A remedy without its numbers yet; None if it makes no sense for this finding."""

Numbers = dict[str, float | str]


STEPS = ("total_steps", "max_steps")
"""Names under which the total number of steps is declared."""


def advise(
    action: str, do: str, why: str, *, scope_is: str = "", safety: str = "notify", **numbers: float | str
) -> Prescription:
    """Something to do, with the step of the finding and, under the name `scope_is`, its scope.

    `do` is an imperative without a full stop, over these numbers and the evidence: `Look at the batch of step {step}`.
    `why` is a sentence of its own, likewise without a full stop.
    """

    def prescribe(finding: Finding, history: History, info: RunInfo) -> Remedy:
        named_scope: Numbers = {scope_is: finding.scope} if scope_is and finding.scope else {}
        parameters: Numbers = {**named_scope, **numbers, "step": finding.step}
        figures = {"scope": place(finding.scope, info) or "the model", **finding.evidence, **parameters}
        return Remedy(action, parameters, why, safety, filled(do, figures))

    return prescribe


def for_cause(cause: FrozenCause, prescription: Prescription) -> Prescription:
    """The prescription if the evidence names this cause, else none."""

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
    """The first of these hyperparameters declared as a number; NaN if there is none."""
    return next((value for name in names if not math.isnan(value := _number(info, name))), math.nan)


def _number(info: RunInfo, name: str) -> float:
    value = info.hyperparameters.get(name)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else math.nan


def scaled(now: float, factor: float) -> Numbers:
    return {"factor": factor} if math.isnan(now) else {"from": now, "to": now * factor}


def beta2(info: RunInfo, default: float) -> float:
    return max((group["beta2"] for group in info.groups if "beta2" in group), default=default)
