"""Remedies for the learning rate and its schedule."""

from __future__ import annotations

import math

import numpy as np

from forewarn.judge.headlines import filled
from forewarn.judge.history import History
from forewarn.judge.lr_course import peak_rate
from forewarn.judge.remedies.prescription import (
    STEPS,
    Numbers,
    Prescription,
    Setting,
    advise,
    change,
    current,
    declared,
    scaled,
)
from forewarn.types import Finding, Remedy, RunInfo, figure

_USUAL_BETA2 = 0.999
_WARM_UP_SHARE = 0.1  # of the declared number of steps: the longest sensible warm-up
_FLOOR_SHARE = 0.1  # of the peak, where a cosine usually ends
_PLATEAU_FACTOR = 0.3  # the default of 0.1 is too much for a run that only needs smaller steps
_PLATEAU_PATIENCE = 2  # epochs
_LR = "the learning rate"


def lower_lr(factor: float, why: str = "smaller steps keep the weights where the loss is low") -> Prescription:
    """Multiply the learning rate by the `lr_factor` of the finding, or else by `factor`; None where it is 0."""

    def prescribe(finding: Finding, history: History, info: RunInfo) -> Remedy | None:
        lr = current("lr", finding, history, info)
        numbers = scaled(lr.value, _own(factor, finding)) | lr.named_group
        do = change("Lower", _LR, numbers, differs=lr.differs)
        return Remedy("lower_lr", numbers, why, safety="opt_in", do=do) if lr.value != 0 else None

    return prescribe


def restore_lr(
    why: str = "the weights then move as far per step as when the run was healthy", *, scope_is_group: bool = False
) -> Prescription:
    """Back to the learning rate before it jumped; without a jump, lower it by the factor the finding is too large."""

    def prescribe(finding: Finding, history: History, info: RunInfo) -> Remedy:
        lr = current("lr", finding, history, info, scope_is_group=scope_is_group)
        before, after = finding.evidence.get("lr_before"), finding.evidence.get("lr_after")
        if isinstance(before, float) and before > 0:
            lr = lr._replace(value=after) if isinstance(after, float) else lr
            return _set_back("raise_lr" if before > lr.value else "lower_lr", lr, before, why)
        excess = finding.evidence.get("ratio", 2.0)
        factor = 1 / excess if isinstance(excess, float) and 1 < excess < math.inf else 0.5
        numbers = scaled(lr.value, factor) | lr.named_group
        do = change("Lower", _LR, numbers, differs=lr.differs)
        return Remedy("lower_lr", numbers, why, safety="opt_in", do=do)

    return prescribe


def set_lr(why: str) -> Prescription:
    """Set the learning rate of the group to what the finding was compared with."""

    def prescribe(finding: Finding, history: History, info: RunInfo) -> Remedy:
        numbers: Numbers = {"group": finding.scope, "from": finding.value, "to": finding.bound}
        do = filled("Set the learning rate of group {group} to {to}", numbers)
        return Remedy("set_lr", numbers, why, safety="opt_in", do=do)

    return prescribe


def raise_lr(
    factor: float,
    why: str = "the steps are too small to make progress",
    *,
    scope_is_group: bool = False,
    of_peak: bool = False,
) -> Prescription:
    """Multiply the learning rate by the finding's `lr_factor`, or else `factor`; if nothing changes, the initial one.

    In a cyclic schedule that is the lowest rate, not `peak_lr`: a stalled run is not restarted at full speed. A group
    that began at 0 gets the rate of the others. With `of_peak`, the peak of a schedule that has decayed is raised.
    """

    def prescribe(finding: Finding, history: History, info: RunInfo) -> Remedy | None:
        lr = current("lr", finding, history, info, scope_is_group=scope_is_group)
        peak = peak_rate(history.panel("train/lr"), info) if of_peak else 0.0
        if peak > lr.value:
            numbers = scaled(peak, _own(factor, finding))
            do = filled("Raise the peak learning rate from {from} to {to}", numbers)
            return Remedy("raise_lr", numbers, why, safety="opt_in", do=do)
        if factor != 1 and lr.value * factor != lr.value:
            numbers = scaled(lr.value, _own(factor, finding)) | lr.named_group
            do = change("Raise", _LR, numbers, differs=lr.differs)
            return Remedy("raise_lr", numbers, why, safety="opt_in", do=do)
        begun = {str(number): group.get("initial_lr", group.get("lr", 0.0)) for number, group in enumerate(info.groups)}
        highest = max(begun.values(), default=0.0)
        to = begun.get(lr.group, highest)
        if to > lr.value:
            return _set_back("raise_lr", lr, to, why)
        if not highest > lr.value:
            return None
        numbers = {"from": lr.value, "to": highest, **lr.named_group}
        do = filled("Set the learning rate of group {group} to {to}, as in the other groups", numbers)
        return Remedy("raise_lr", numbers, why, safety="opt_in", do=do)

    return prescribe


def _own(factor: float, finding: Finding) -> float:
    """The factor that the finding computed from its readings, or else this one."""
    own = finding.evidence.get("lr_factor", factor)
    return own if isinstance(own, float) else factor


def _set_back(action: str, lr: Setting, to: float, why: str) -> Remedy:
    numbers: Numbers = {"from": lr.value, "to": to} | ({"group": lr.group} if lr.group else {})
    whose = f" of group {lr.group}" if lr.group else ""
    return Remedy(action, numbers, why, safety="opt_in", do=f"Set the learning rate{whose} back to {figure(to)}")


def warm_up(why: str = "the optimizer's statistics settle before the steps get large") -> Prescription:
    """Raise the learning rate linearly over 2 / (1 − β2) steps (Ma and Yarats 2021), to its value before any jump.

    The warm-up takes at most a tenth of the declared steps; if none are declared, at most the steps so far.
    """

    def prescribe(finding: Finding, history: History, info: RunInfo) -> Remedy:
        beta2 = current("beta2", finding, history, info).value
        steps = round(2 / max(1 - (_USUAL_BETA2 if math.isnan(beta2) else beta2), 1e-4))
        total = declared(info, "total_steps")
        most = round(_WARM_UP_SHARE * total) if total > 0 else finding.step + 1
        before = finding.evidence.get("lr_before")
        lr = current("lr", finding, history, info)
        to = before if isinstance(before, float) and before > 0 else lr.value
        numbers: Numbers = {"steps": max(1, min(steps, most)), "to": to, **lr.named_group}
        words = "Warm up the learning rate" + (" of group {group}" if lr.named_group else "")
        words += ("" if math.isnan(to) else " to {to}") + " over {steps} steps"
        return Remedy("warm_up", numbers, why, do=filled(words, numbers))

    return prescribe


def decay_lr(why: str = "small steps settle where large ones overshoot") -> Prescription:
    """Decay the learning rate to a tenth, over the remaining steps if their number is declared."""

    def prescribe(finding: Finding, history: History, info: RunInfo) -> Remedy | None:
        now = current("lr", finding, history, info).value
        if now == 0:
            return None
        numbers: Numbers = {"shape": "cosine"}
        words = "Decay the learning rate"
        if math.isnan(now):
            words += " to a tenth"
        else:
            numbers |= {"from": now, "to": _FLOOR_SHARE * now}
            words += " from {from} to {to}"
        total = declared(info, *STEPS)
        if total > finding.step + 1:
            numbers["steps"] = total - finding.step - 1
            words += " over {steps} steps"
        return Remedy("decay_lr", numbers, why, do=filled(words, numbers))

    return prescribe


def reduce_on_plateau(why: str = "it lowers the learning rate whenever the validation loss stalls") -> Prescription:
    """Let the validation loss control the learning rate; None where a schedule already changes it."""
    use = advise(
        "reduce_on_plateau",
        "Step `torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor={factor}, patience={patience})` each epoch",
        why, factor=_PLATEAU_FACTOR, patience=_PLATEAU_PATIENCE,
    )  # fmt: skip

    def prescribe(finding: Finding, history: History, info: RunInfo) -> Remedy | None:
        rates = history.panel("train/lr").values
        is_scheduled = len(rates) and (np.fmax.reduce(rates) != np.fmin.reduce(rates)).any()
        return None if is_scheduled else use(finding, history, info)

    return prescribe


def plan_steps(why: str = "the schedule should end when training ends") -> Prescription:
    """Plan the schedule for the number of steps that the run takes."""

    def prescribe(finding: Finding, history: History, info: RunInfo) -> Remedy:
        planned = finding.evidence.get("ended", declared(info, *STEPS))
        needed = finding.evidence.get("steps_needed", finding.step + 1)
        is_different = isinstance(planned, int | float) and not math.isnan(planned) and planned != needed
        numbers: Numbers = {"from": planned, "to": needed} if is_different else {"to": needed}
        words = "Plan the schedule for {to} steps" + (" instead of {from}" if is_different else "")
        return Remedy("plan_steps", numbers, why, do=filled(words, numbers))

    return prescribe
