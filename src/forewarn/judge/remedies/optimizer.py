"""Remedies for the optimizer: clipping, Adam's moments, weight decay, missing parameters."""

from __future__ import annotations

import math
from dataclasses import replace

from forewarn.judge.headlines import place
from forewarn.judge.history import History
from forewarn.judge.remedies.prescription import Numbers, Prescription, advise, change, current, scaled
from forewarn.types import Finding, Remedy, RunInfo, figure

_CLIP_AT = 1.0  # the usual limit for language models (GPT-3, Llama), for runs without a usable norm
_CLIP_WINDOW = 100  # steps whose median gradient norm is the usual norm of the run
_STABLE_BETA2 = 0.95  # used by large models against spikes (Zhang et al. 2022, OPT; Touvron et al. 2023, Llama)
_FIRST_WEIGHT_DECAY = 0.01  # the default of AdamW
_USUAL_WEIGHT_DECAY = 0.1  # used by large models (GPT-3, Llama)


def clip_gradient(why: str = "clipping limits the damage from one bad batch") -> Prescription:
    """Clip at the run's usual gradient norm; if the run clips already, at half its current limit."""

    def prescribe(finding: Finding, history: History, info: RunInfo) -> Remedy:
        clip, norms = history.series("train/clip"), history.series("gradient/global_norm")
        if clip.last > 0 and clip.at >= norms.at:  # otherwise the loop no longer clips
            numbers: Numbers = {"from": clip.last, "to": clip.last / 2}
            return Remedy("lower_clip", numbers, why, safety="opt_in", do=change("Lower", "the clipping norm", numbers))
        usual = norms.median(_CLIP_WINDOW, skip=1)
        healthy = usual if 0 < usual < abs(finding.bound) else _CLIP_AT
        do = f"Clip gradients to a norm of {figure(healthy)}"
        return Remedy("clip_gradient", {"max_norm": healthy}, why, safety="opt_in", do=do)

    return prescribe


def raise_clip(why: str = "a limit near the usual norm cuts off only the outliers") -> Prescription:
    """Clip at the run's usual gradient norm instead of far below it; None if no norm is known."""

    def prescribe(finding: Finding, history: History, info: RunInfo) -> Remedy | None:
        usual = history.series("gradient/global_norm").median(_CLIP_WINDOW)
        do = f"Raise the clipping norm to {figure(usual)}"
        return Remedy("raise_clip", {"max_norm": usual}, why, do=do) if usual > 0 else None

    return prescribe


def lower_beta2(why: str = "Adam then adapts to larger gradients within tens of steps") -> Prescription:
    """Let Adam forget old gradients sooner; None if the optimizer has no β2 or a low one already."""

    def prescribe(finding: Finding, history: History, info: RunInfo) -> Remedy | None:
        beta2 = current("beta2", finding, history, info)
        if not beta2.value > _STABLE_BETA2:
            return None
        numbers: Numbers = {"from": beta2.value, "to": _STABLE_BETA2, **beta2.named_group}
        return Remedy("lower_beta2", numbers, why, do=change("Lower", "beta2", numbers))

    return prescribe


def lower_weight_decay(factor: float, why: str = "the decay is stronger than the gradient") -> Prescription:
    """Multiply the weight decay by `factor`, or more so that it is 0.01 at most; None if there is none."""

    def prescribe(finding: Finding, history: History, info: RunInfo) -> Remedy | None:
        decay = current("weight_decay", finding, history, info)
        if decay.value == 0 or math.isnan(decay.value):
            return None
        lowest = min(factor, _FIRST_WEIGHT_DECAY / decay.value) if decay.value > _FIRST_WEIGHT_DECAY else factor
        numbers = scaled(decay.value, lowest) | decay.named_group
        return Remedy("lower_weight_decay", numbers, why, do=change("Lower", "the weight decay", numbers))

    return prescribe


def raise_weight_decay(why: str = "small weights fit the pattern rather than the noise") -> Prescription:
    """More weight decay: 0.01 where there is none, then 0.1, then twice as much."""

    def prescribe(finding: Finding, history: History, info: RunInfo) -> Remedy:
        decay = current("weight_decay", finding, history, info)
        now = 0.0 if math.isnan(decay.value) else decay.value
        if now < _FIRST_WEIGHT_DECAY:
            to = _FIRST_WEIGHT_DECAY
        else:
            to = _USUAL_WEIGHT_DECAY if now < _USUAL_WEIGHT_DECAY else 2 * now
        numbers: Numbers = {"from": now, "to": to, **decay.named_group}
        do = change("Raise", "the weight decay", numbers)
        return Remedy("raise_weight_decay", numbers, why, safety="opt_in", do=do)

    return prescribe


def exempt_from_decay(why: str = "weight decay removes weights that get little gradient") -> Prescription:
    """Take the parameter out of weight decay; None if its group has none."""
    exempt = advise("exempt_from_decay", "Exclude {scope} from weight decay", why, scope_is="parameter")

    def prescribe(finding: Finding, history: History, info: RunInfo) -> Remedy | None:
        decays = current("weight_decay", finding, history, info).value != 0
        return exempt(finding, history, info) if decays else None

    return prescribe


def add_to_optimizer(why: str = "an optimizer only updates the parameters it was given") -> Prescription:
    """Add the parameter to the optimizer."""

    def prescribe(finding: Finding, history: History, info: RunInfo) -> Remedy:
        lr = current("lr", replace(finding, scope=""), history, info).value  # it is in no group: that of the run
        do = f"Add {place(finding.scope, info) or 'the parameter'} to the optimizer"
        lr = lr if lr > 0 else math.nan  # a schedule that has not begun
        do += "" if math.isnan(lr) else f" with learning rate {figure(lr)}"
        return Remedy("add_to_optimizer", {"parameter": finding.scope, "lr": lr}, why, do=do)

    return prescribe


def keep_in_float32(why: str = "in low precision, small updates are rounded away") -> Prescription:
    """Keep the master copy of the weight in float32; None if it is in float32 or wider already."""

    def prescribe(finding: Finding, history: History, info: RunInfo) -> Remedy | None:
        parameter = info.parameters.get(finding.scope)
        dtype = parameter.dtype if parameter else "low precision"
        if dtype in ("float32", "float64"):
            return None
        numbers: Numbers = {"from": dtype, "to": "float32", "parameter": finding.scope}
        do = f"Keep {place(finding.scope, info) or 'the weights'} in float32 instead of {dtype}"
        return Remedy("keep_in_float32", numbers, why, do=do)

    return prescribe
