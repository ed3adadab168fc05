"""What to do: pure functions from a finding, the history and the facts to a remedy with its numbers filled in.

Each function here makes a prescription to name in a rule's `remedies`; the numbers come from the run it is applied to.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from forewarn.history import History
from forewarn.types import Facts, Finding, FrozenCause, Remedy, in_words

Prescription = Callable[[Finding, History, Facts], Remedy | None]
"""A remedy without its numbers yet; None where it makes no sense for this finding."""

Numbers = dict[str, float | str]

_CLIP_AT = 1.0  # the usual bound for language models (GPT-3, Llama), where a run says nothing of its own
_CLIP_WINDOW = 100  # steps whose median gradient norm is the run's own usual one
_STABLE_BETA2 = 0.95  # what large models train with against spikes (Zhang et al. 2022, OPT; Touvron et al. 2023, Llama)
_USUAL_BETA2 = 0.999
_LARGEST_SHIFT = 5  # powers of two by which the weight of a task is moved at once: × 32
_WARM_UP_SHARE = 0.1  # of the declared number of steps: a longer warm-up is a run of its own


def advise(action: str, why: str, *, scope_is: str = "", **numbers: float | str) -> Prescription:
    """Something for a person to do, with the step of the finding and, under the name `scope_is`, its scope."""

    def prescribe(finding: Finding, history: History, facts: Facts) -> Remedy:
        known: Numbers = {scope_is: finding.scope} if scope_is and finding.scope else {}
        return Remedy(action, {**known, **numbers, "step": finding.step}, why)

    return prescribe


def lower_lr(factor: float, why: str = "smaller steps keep the weights where the loss is low") -> Prescription:
    """Multiply the learning rate by `factor`; None where it is 0."""

    def prescribe(finding: Finding, history: History, facts: Facts) -> Remedy | None:
        now = current_lr(history, facts)
        return Remedy("lower_lr", _scaled(now, factor), why, safety="opt_in") if now != 0 else None

    return prescribe


def restore_lr(
    why: str = "the weights move no further per step than they did while the run was healthy",
) -> Prescription:
    """Back to the learning rate before it jumped; without a jump, lower by as much as the finding exceeds its level."""

    def prescribe(finding: Finding, history: History, facts: Facts) -> Remedy:
        now, before = current_lr(history), finding.evidence.get("lr_before")
        if isinstance(before, float) and before > 0:
            return Remedy("lower_lr", {"from": now, "to": before}, why, safety="opt_in")
        excess = finding.evidence.get("ratio", 2.0)
        factor = 1 / excess if isinstance(excess, float) and 1 < excess < math.inf else 0.5
        return Remedy("lower_lr", _scaled(now, factor), why, safety="opt_in")

    return prescribe


def set_lr(why: str) -> Prescription:
    """Set the learning rate of the group to what the finding was compared with."""

    def prescribe(finding: Finding, history: History, facts: Facts) -> Remedy:
        return Remedy(
            "set_lr", {"group": finding.scope, "from": finding.value, "to": finding.bound}, why, safety="opt_in"
        )

    return prescribe


def raise_lr(factor: float, why: str = "the steps are too small to get anywhere") -> Prescription:
    """Multiply the learning rate by `factor`; where it is 0, back to what the run began with."""

    def prescribe(finding: Finding, history: History, facts: Facts) -> Remedy | None:
        now = current_lr(history, facts)
        if now != 0:
            return Remedy("raise_lr", _scaled(now, factor), why, safety="opt_in")
        begun = max((group.get("initial_lr", group.get("lr", 0.0)) for group in facts.groups), default=0.0)
        return Remedy("raise_lr", {"from": now, "to": begun}, why, safety="opt_in") if begun > 0 else None

    return prescribe


def warm_up(why: str = "the statistics of the optimizer settle before the steps are large") -> Prescription:
    """Let the learning rate rise linearly over 2 / (1 − β2) steps (Ma and Yarats 2021), to where it was before a jump.

    Over no more than a tenth of the declared steps, or, where none are declared, than the run has made so far.
    """

    def prescribe(finding: Finding, history: History, facts: Facts) -> Remedy:
        steps = round(2 / max(1 - _beta2(facts, _USUAL_BETA2), 1e-4))
        total = facts.hyperparameters.get("total_steps")
        if isinstance(total, int | float) and not isinstance(total, bool) and total > 0:
            most = round(_WARM_UP_SHARE * total)
        else:
            most = finding.step + 1
        before = finding.evidence.get("lr_before")
        to = before if isinstance(before, float) and before > 0 else current_lr(history)
        return Remedy("warm_up", {"steps": max(1, min(steps, most)), "to": to}, why)

    return prescribe


def skip_batch(why: str = "one bad batch must not move the weights") -> Prescription:
    """Leave out the batch that the finding is about."""

    def prescribe(finding: Finding, history: History, facts: Facts) -> Remedy:
        return Remedy("skip_batch", {"step": finding.step}, why, safety="safe")

    return prescribe


def snapshot(why: str = "the state at this step is what a search for the cause starts from") -> Prescription:
    """Save the model, the optimizer and the recent readings."""

    def prescribe(finding: Finding, history: History, facts: Facts) -> Remedy:
        return Remedy("snapshot", {"step": finding.step}, why, safety="safe")

    return prescribe


def roll_back(why: str = "the weights from before it are still good") -> Prescription:
    """Return to the last checkpoint before the trouble began; None where it began with the run."""

    def prescribe(finding: Finding, history: History, facts: Facts) -> Remedy | None:
        lasting = finding.evidence.get("lasting_steps", 1)
        began = finding.step - int(lasting) + 1 if isinstance(lasting, int | float) else finding.step
        return Remedy("roll_back", {"before_step": began}, why, safety="opt_in") if began > 0 else None

    return prescribe


def stop(why: str = "every further step is spent on a run that is lost") -> Prescription:
    """End the run."""

    def prescribe(finding: Finding, history: History, facts: Facts) -> Remedy:
        return Remedy("stop", {"step": finding.step}, why, safety="opt_in")

    return prescribe


def clip_gradient(why: str = "a bounded gradient norm bounds what one batch can do") -> Prescription:
    """Clip at the run's usual gradient norm; where it is clipped already, at half of that."""

    def prescribe(finding: Finding, history: History, facts: Facts) -> Remedy:
        clip = history.series("train/clip").last
        if clip > 0:
            return Remedy("lower_clip", {"from": clip, "to": clip / 2}, why, safety="opt_in")
        usual = history.series("gradient/global_norm").median(_CLIP_WINDOW, skip=1)
        healthy = usual if 0 < usual < abs(finding.bound) else _CLIP_AT
        return Remedy("clip_gradient", {"max_norm": healthy}, why, safety="opt_in")

    return prescribe


def lower_beta2(why: str = "the optimizer then notices a rise of the gradients within tens of steps") -> Prescription:
    """Let Adam forget old gradients sooner; None for optimizers without β2 or where it is low already."""

    def prescribe(finding: Finding, history: History, facts: Facts) -> Remedy | None:
        now = _beta2(facts, 0.0)
        if now <= _STABLE_BETA2:
            return None
        return Remedy("lower_beta2", {"from": now, "to": _STABLE_BETA2}, why)

    return prescribe


def lower_weight_decay(factor: float, why: str = "the decay pulls harder than the gradient pushes") -> Prescription:
    """Multiply the weight decay by `factor`; None if the run has none."""

    def prescribe(finding: Finding, history: History, facts: Facts) -> Remedy | None:
        now = max((group.get("weight_decay", 0.0) for group in facts.groups), default=0.0)
        return Remedy("lower_weight_decay", _scaled(now, factor), why) if now > 0 else None

    return prescribe


def add_to_optimizer(why: str = "the optimizer moves only what is in one of its groups") -> Prescription:
    """Hand the parameter to the optimizer."""

    def prescribe(finding: Finding, history: History, facts: Facts) -> Remedy:
        return Remedy("add_to_optimizer", {"parameter": finding.scope, "lr": current_lr(history)}, why)

    return prescribe


def keep_in_float32(why: str = "in few bits a small update is rounded back to the old weight") -> Prescription:
    """Keep the master copy of the weight in float32; None where it is in float32 or wider already."""

    def prescribe(finding: Finding, history: History, facts: Facts) -> Remedy | None:
        known = facts.parameters.get(finding.scope)
        dtype = known.dtype if known else "low precision"
        if dtype in ("float32", "float64"):
            return None
        return Remedy("keep_in_float32", {"from": dtype, "to": "float32", "parameter": finding.scope}, why)

    return prescribe


def shift_task_weight(raised: bool, why: str) -> Prescription:
    """Raise the weight of the starved task, or lower that of the dominating one, by half of what they are apart.

    The factor is the power of two nearest the square root of their ratio, so that both changes together even them out.
    """

    def prescribe(finding: Finding, history: History, facts: Facts) -> Remedy | None:
        task, apart = finding.evidence.get("starved" if raised else "dominating"), finding.evidence.get("ratio", 1.0)
        if not isinstance(task, str) or not isinstance(apart, float) or not apart > 0:
            return None
        power = round(abs(math.log2(apart)) / 2) if math.isfinite(apart) else _LARGEST_SHIFT
        factor = 2.0 ** (min(max(power, 1), _LARGEST_SHIFT) * (1 if raised else -1))
        known = history.series("task/weight", task).finite()
        action = "raise_task_weight" if raised else "lower_task_weight"
        numbers: Numbers = {"from": float(known[-1]), "to": float(known[-1]) * factor} if len(known) else {}
        return Remedy(action, {**numbers, "task": task, "by": f"× {in_words(factor)}"}, why)

    return prescribe


def widen_range(why: str) -> Prescription:
    """Move the bound that the finding is beyond to where its value is."""

    def prescribe(finding: Finding, history: History, facts: Facts) -> Remedy:
        return Remedy("widen_range", {"from": finding.bound, "to": finding.value, "metric": finding.scope}, why)

    return prescribe


def for_cause(cause: FrozenCause, prescription: Prescription) -> Prescription:
    """The prescription where the evidence names this cause, nothing elsewhere."""

    def prescribe(finding: Finding, history: History, facts: Facts) -> Remedy | None:
        return prescription(finding, history, facts) if finding.evidence.get("cause") == cause.name.lower() else None

    return prescribe


def current_lr(history: History, facts: Facts | None = None) -> float:
    """The largest learning rate among the parameter groups now; before the first step what the facts say, else NaN."""
    last = history.panel("train/lr").last
    if len(last) and not np.isnan(last).all():
        return float(np.nanmax(last))
    return max((group["lr"] for group in facts.groups if "lr" in group), default=math.nan) if facts else math.nan


def _scaled(now: float, factor: float) -> Numbers:
    return {"factor": factor} if math.isnan(now) else {"from": now, "to": now * factor}


def _beta2(facts: Facts, default: float) -> float:
    return max((group["beta2"] for group in facts.groups if "beta2" in group), default=default)
