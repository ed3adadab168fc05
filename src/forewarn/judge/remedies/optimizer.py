"""Remedies for the optimizer: clipping, Adam's moments, weight decay, missing parameters."""

from __future__ import annotations

from forewarn.judge.history import History
from forewarn.judge.remedies.prescription import Prescription, beta2, current_lr, scaled
from forewarn.types import Finding, Remedy, RunInfo

_CLIP_AT = 1.0  # the usual bound for language models (GPT-3, Llama), where a run says nothing of its own
_CLIP_WINDOW = 100  # steps whose median gradient norm is the run's own usual one
_STABLE_BETA2 = 0.95  # what large models train with against spikes (Zhang et al. 2022, OPT; Touvron et al. 2023, Llama)
_FIRST_WEIGHT_DECAY = 0.01  # AdamW's own default
_USUAL_WEIGHT_DECAY = 0.1  # what large models train with (GPT-3, Llama)


def clip_gradient(why: str = "a bounded gradient norm bounds what one batch can do") -> Prescription:
    """Clip at the run's usual gradient norm; where it is clipped already, at half of that."""

    def prescribe(finding: Finding, history: History, info: RunInfo) -> Remedy:
        clip = history.series("train/clip").last
        if clip > 0:
            return Remedy("lower_clip", {"from": clip, "to": clip / 2}, why, safety="opt_in")
        usual = history.series("gradient/global_norm").median(_CLIP_WINDOW, skip=1)
        healthy = usual if 0 < usual < abs(finding.bound) else _CLIP_AT
        return Remedy("clip_gradient", {"max_norm": healthy}, why, safety="opt_in")

    return prescribe


def lower_beta2(why: str = "the optimizer then notices a rise of the gradients within tens of steps") -> Prescription:
    """Let Adam forget old gradients sooner; None for optimizers without β2 or where it is low already."""

    def prescribe(finding: Finding, history: History, info: RunInfo) -> Remedy | None:
        now = beta2(info, 0.0)
        if now <= _STABLE_BETA2:
            return None
        return Remedy("lower_beta2", {"from": now, "to": _STABLE_BETA2}, why)

    return prescribe


def lower_weight_decay(factor: float, why: str = "the decay pulls harder than the gradient pushes") -> Prescription:
    """Multiply the weight decay by `factor`; None if the run has none."""

    def prescribe(finding: Finding, history: History, info: RunInfo) -> Remedy | None:
        now = max((group.get("weight_decay", 0.0) for group in info.groups), default=0.0)
        return Remedy("lower_weight_decay", scaled(now, factor), why) if now > 0 else None

    return prescribe


def raise_weight_decay(why: str = "small weights fit the pattern rather than the noise") -> Prescription:
    """More weight decay: 0.01 where there is none, then 0.1, then twice as much."""

    def prescribe(finding: Finding, history: History, info: RunInfo) -> Remedy:
        now = max((group.get("weight_decay", 0.0) for group in info.groups), default=0.0)
        if now < _FIRST_WEIGHT_DECAY:
            to = _FIRST_WEIGHT_DECAY
        else:
            to = _USUAL_WEIGHT_DECAY if now < _USUAL_WEIGHT_DECAY else 2 * now
        return Remedy("raise_weight_decay", {"from": now, "to": to}, why, safety="opt_in")

    return prescribe


def add_to_optimizer(why: str = "the optimizer moves only what is in one of its groups") -> Prescription:
    """Add the parameter to the optimizer."""

    def prescribe(finding: Finding, history: History, info: RunInfo) -> Remedy:
        return Remedy("add_to_optimizer", {"parameter": finding.scope, "lr": current_lr(history)}, why)

    return prescribe


def keep_in_float32(why: str = "in few bits a small update is rounded back to the old weight") -> Prescription:
    """Keep the master copy of the weight in float32; None if it already is in float32 or wider."""

    def prescribe(finding: Finding, history: History, info: RunInfo) -> Remedy | None:
        parameter = info.parameters.get(finding.scope)
        dtype = parameter.dtype if parameter else "low precision"
        if dtype in ("float32", "float64"):
            return None
        return Remedy("keep_in_float32", {"from": dtype, "to": "float32", "parameter": finding.scope}, why)

    return prescribe
