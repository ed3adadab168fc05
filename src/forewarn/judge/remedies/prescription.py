"""Prescriptions, and the facts about a run that they share.

A prescription turns a finding, the history and the facts of a run into a remedy with its numbers filled in.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from forewarn.judge.headlines import filled, place
from forewarn.judge.history import History
from forewarn.types import Finding, Remedy, RunInfo

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


def for_cause(cause: IntEnum | str, prescription: Prescription) -> Prescription:
    """The prescription, only for findings whose evidence names this cause."""
    name = cause.name.lower() if isinstance(cause, IntEnum) else cause

    def prescribe(finding: Finding, history: History, info: RunInfo) -> Remedy | None:
        return prescription(finding, history, info) if finding.evidence.get("cause") == name else None

    prescribe.cause = name  # type: ignore[attr-defined]  # the documentation shows it
    return prescribe


class Setting(NamedTuple):
    """A setting of the optimizer as it is now, in the groups that a finding is about."""

    value: float
    """The largest among these groups; NaN if it is not known."""
    group: str = ""
    """The number of the group, if it is one of several."""
    differs: bool = False
    """Whether these groups have different values."""
    is_shared: bool = False
    """Whether all groups of the run have this value."""

    @property
    def named_group(self) -> Numbers:
        """The group, if its value is not that of the whole run."""
        return {"group": self.group} if self.group and not self.is_shared else {}


def current(name: str, finding: Finding, history: History, info: RunInfo, *, scope_is_group: bool = False) -> Setting:
    """`lr`, `weight_decay` or `beta2` of the groups that hold the scope of the finding, as recorded last.

    Before the first step it is the initial value. A finding about the whole run concerns every group.
    """
    values = _by_group(name, history, info)
    concerned = {finding.scope} if scope_is_group and finding.scope in values else _groups_of(finding, info)
    own = {group: value for group, value in values.items() if group in concerned} if concerned else values
    if concerned is not None and not concerned and len(set(own.values())) > 1:
        return Setting(math.nan)  # a parameter that joined the optimizer later: which group is not known
    single = next(iter(own)) if len(own) == 1 < len(values) else ""
    distinct, everywhere = set(own.values()), set(values.values())
    return Setting(max(distinct, default=math.nan), single, len(distinct) > 1, len(everywhere) == 1)


def _by_group(name: str, history: History, info: RunInfo) -> dict[str, float]:
    """The setting in every group that has it, by number."""
    recorded = history.panel(f"train/{name}")
    last = zip(recorded.scopes, recorded.last, strict=True)
    values = {group: float(str(value)) for group, value in last if not np.isnan(value)}  # 0.01, not 0.00999999978
    return values or {str(number): group[name] for number, group in enumerate(info.groups) if name in group}


def _groups_of(finding: Finding, info: RunInfo) -> set[str] | None:
    """The groups of a parameter or of a module's parameters; None for the whole run or a module without parameters."""
    if isinstance(group := finding.evidence.get("group"), str):
        return {group}
    parameter, prefix = info.parameters.get(finding.scope), f"{finding.scope}."
    inside = [parameter] if parameter else [held for name, held in info.parameters.items() if name.startswith(prefix)]
    return {str(held.group) for held in inside if held.group is not None} if inside else None


def declared(info: RunInfo, *names: str) -> float:
    """The first of these hyperparameters declared as a number; NaN if there is none."""
    return next((value for name in names if not math.isnan(value := _number(info, name))), math.nan)


def _number(info: RunInfo, name: str) -> float:
    value = info.hyperparameters.get(name)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else math.nan


def scaled(now: float, factor: float) -> Numbers:
    return {"factor": factor} if math.isnan(now) else {"from": now, "to": now * factor}


def change(verb: str, quantity: str, numbers: Numbers, *, differs: bool = False) -> str:
    """A change in words: `Lower the learning rate from 0.1 to 0.05`, or `Multiply the learning rate by 0.5`.

    If it `differs` between groups, the numbers are those of the largest.
    """
    quantity += filled(" of group {group}", numbers) if "group" in numbers else ""
    if "from" in numbers:
        others = ", and that of the other groups by the same factor" if differs else ""
        return f"{verb} {quantity} {filled('from {from} to {to}', numbers)}{others}"
    return f"Multiply {quantity} {filled('by {factor}', numbers)}"
