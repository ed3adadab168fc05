"""Remedies for the learning rate and its schedule."""

from __future__ import annotations

import math

from forewarn.judge.history import History
from forewarn.judge.remedies.prescription import STEPS, Prescription, beta2, current_lr, declared, scaled
from forewarn.types import Finding, Remedy, RunInfo

_USUAL_BETA2 = 0.999
_WARM_UP_SHARE = 0.1  # of the declared number of steps: a longer warm-up is a run of its own
_FLOOR_SHARE = 0.1  # of the peak, where a cosine usually ends


def lower_lr(factor: float, why: str = "smaller steps keep the weights where the loss is low") -> Prescription:
    """Multiply the learning rate by `factor`; None where it is 0."""

    def prescribe(finding: Finding, history: History, info: RunInfo) -> Remedy | None:
        now = current_lr(history, info)
        return Remedy("lower_lr", scaled(now, factor), why, safety="opt_in") if now != 0 else None

    return prescribe


def restore_lr(
    why: str = "the weights move no further per step than they did while the run was healthy",
) -> Prescription:
    """Back to the learning rate before it jumped; without a jump, lower by as much as the finding exceeds its level."""

    def prescribe(finding: Finding, history: History, info: RunInfo) -> Remedy:
        now, before = current_lr(history), finding.evidence.get("lr_before")
        if isinstance(before, float) and before > 0:
            return Remedy("lower_lr", {"from": now, "to": before}, why, safety="opt_in")
        excess = finding.evidence.get("ratio", 2.0)
        factor = 1 / excess if isinstance(excess, float) and 1 < excess < math.inf else 0.5
        return Remedy("lower_lr", scaled(now, factor), why, safety="opt_in")

    return prescribe


def set_lr(why: str) -> Prescription:
    """Set the learning rate of the group to what the finding was compared with."""

    def prescribe(finding: Finding, history: History, info: RunInfo) -> Remedy:
        return Remedy(
            "set_lr", {"group": finding.scope, "from": finding.value, "to": finding.bound}, why, safety="opt_in"
        )

    return prescribe


def raise_lr(factor: float, why: str = "the steps are too small to get anywhere") -> Prescription:
    """Multiply the learning rate by `factor`; where it is 0, back to what the run began with.

    That is the rate at the foot of a cycle, not `peak_lr`: a run that stands still is not restarted at full speed.
    """

    def prescribe(finding: Finding, history: History, info: RunInfo) -> Remedy | None:
        now = current_lr(history, info)
        if now != 0:
            return Remedy("raise_lr", scaled(now, factor), why, safety="opt_in")
        begun = max((group.get("initial_lr", group.get("lr", 0.0)) for group in info.groups), default=0.0)
        return Remedy("raise_lr", {"from": now, "to": begun}, why, safety="opt_in") if begun > 0 else None

    return prescribe


def warm_up(why: str = "the statistics of the optimizer settle before the steps are large") -> Prescription:
    """Let the learning rate rise linearly over 2 / (1 − β2) steps (Ma and Yarats 2021), to where it was before a jump.

    Over no more than a tenth of the declared steps, or, where none are declared, than the run has made so far.
    """

    def prescribe(finding: Finding, history: History, info: RunInfo) -> Remedy:
        steps = round(2 / max(1 - beta2(info, _USUAL_BETA2), 1e-4))
        total = declared(info, "total_steps")
        most = round(_WARM_UP_SHARE * total) if total > 0 else finding.step + 1
        before = finding.evidence.get("lr_before")
        to = before if isinstance(before, float) and before > 0 else current_lr(history)
        return Remedy("warm_up", {"steps": max(1, min(steps, most)), "to": to}, why)

    return prescribe


def decay_lr(why: str = "small steps at the end find what large ones jump over") -> Prescription:
    """Decay the learning rate to a tenth, over the remaining steps if their number is declared."""

    def prescribe(finding: Finding, history: History, info: RunInfo) -> Remedy | None:
        now = current_lr(history, info)
        if now == 0:
            return None
        numbers: dict[str, float | str] = {"shape": "cosine"}
        if not math.isnan(now):
            numbers |= {"from": now, "to": _FLOOR_SHARE * now}
        total = declared(info, *STEPS)
        if total > finding.step + 1:
            numbers["steps"] = total - finding.step - 1
        return Remedy("decay_lr", numbers, why)

    return prescribe


def plan_steps(why: str = "a schedule ends well only if it ends with the training") -> Prescription:
    """The number of steps the schedule is planned for, and the number it should be planned for."""

    def prescribe(finding: Finding, history: History, info: RunInfo) -> Remedy:
        planned = finding.evidence.get("ended", declared(info, *STEPS))
        needed = finding.evidence.get("steps_needed", finding.step + 1)
        is_different = isinstance(planned, int | float) and not math.isnan(planned) and planned != needed
        return Remedy("plan_steps", {"from": planned, "to": needed} if is_different else {"to": needed}, why)

    return prescribe
