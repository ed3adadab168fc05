"""Remedies for the model, the data, the weights of tasks and the healthy range of a metric."""

from __future__ import annotations

import math

from forewarn.judge.history import History
from forewarn.judge.remedies.prescription import Numbers, Prescription, declared
from forewarn.types import Finding, Remedy, RunInfo, in_words

_LARGEST_SHIFT = 5  # powers of two by which the weight of a task is moved at once: × 32
_FIRST_DROPOUT = 0.1  # where there is none yet (Srivastava et al. 2014 use more, transformers 0.1)
_MOST_DROPOUT = 0.5
_WIDTHS = ("width", "hidden_size", "hidden_dim", "d_model", "n_embd", "embed_dim")
_DEPTHS = ("depth", "num_layers", "num_hidden_layers", "n_layer", "layers")
_SAMPLES = ("num_samples", "train_samples", "dataset_size")


def raise_dropout(why: str = "units that may be missing can not learn single samples by heart") -> Prescription:
    """More dropout: 0.1 where there is none, else half as much again; None where there is much already."""

    def prescribe(finding: Finding, history: History, info: RunInfo) -> Remedy | None:
        now = declared(info, "dropout", "dropout_rate", "dropout_p")
        if math.isnan(now):
            return Remedy("raise_dropout", {"to": _FIRST_DROPOUT}, why)
        to = _FIRST_DROPOUT if now < _FIRST_DROPOUT else min(_MOST_DROPOUT, round(1.5 * now, 2))
        return Remedy("raise_dropout", {"from": now, "to": to}, why) if to > now else None

    return prescribe


def add_data(why: str = "what must fit more samples can not learn each of them by heart") -> Prescription:
    """Twice the samples, or augmentation that makes up for them."""

    def prescribe(finding: Finding, history: History, info: RunInfo) -> Remedy:
        now = declared(info, *_SAMPLES)
        return Remedy("add_data", {"factor": 2} if math.isnan(now) else {"from": now, "to": 2 * now}, why)

    return prescribe


def widen(why: str = "a model that is too small for the task fits neither set") -> Prescription:
    """Twice the width where it is declared; None elsewhere."""

    def prescribe(finding: Finding, history: History, info: RunInfo) -> Remedy | None:
        now = declared(info, *_WIDTHS)
        return None if math.isnan(now) else Remedy("widen", {"from": now, "to": 2 * now}, why)

    return prescribe


def deepen(why: str = "more layers make more of the same width") -> Prescription:
    """Half as many blocks again, by what is declared or was found in the model; None if it has none."""

    def prescribe(finding: Finding, history: History, info: RunInfo) -> Remedy | None:
        named = declared(info, *_DEPTHS)
        now = info.depth if math.isnan(named) else named
        return Remedy("deepen", {"from": now, "to": now + max(1, now // 2)}, why) if now > 0 else None

    return prescribe


def add_parameters(why: str = "a model that is too small for the task fits neither set") -> Prescription:
    """Twice the parameters; None where the width or the depth is known, which say it better."""

    def prescribe(finding: Finding, history: History, info: RunInfo) -> Remedy | None:
        if info.depth or not math.isnan(declared(info, *_WIDTHS, *_DEPTHS)):
            return None
        now = info.num_parameters
        return Remedy("add_parameters", {"from": now, "to": 2 * now} if now else {"factor": 2}, why)

    return prescribe


def shift_task_weight(raised: bool, why: str) -> Prescription:
    """Raise the weight of the starved task, or lower that of the dominating one, by half of the gap between them.

    The factor is the power of two nearest the square root of their ratio, so that both changes together even them out.
    """

    def prescribe(finding: Finding, history: History, info: RunInfo) -> Remedy | None:
        task, apart = finding.evidence.get("starved" if raised else "dominating"), finding.evidence.get("ratio", 1.0)
        if not isinstance(task, str) or not isinstance(apart, float) or not apart > 0:
            return None
        power = round(abs(math.log2(apart)) / 2) if math.isfinite(apart) else _LARGEST_SHIFT
        factor = 2.0 ** (min(max(power, 1), _LARGEST_SHIFT) * (1 if raised else -1))
        weights = history.series("task/weight", task).finite()
        action = "raise_task_weight" if raised else "lower_task_weight"
        numbers: Numbers = {"from": float(weights[-1]), "to": float(weights[-1]) * factor} if len(weights) else {}
        return Remedy(action, {**numbers, "task": task, "by": f"× {in_words(factor)}"}, why)

    return prescribe


def widen_range(why: str) -> Prescription:
    """Move the exceeded bound to the value of the finding."""

    def prescribe(finding: Finding, history: History, info: RunInfo) -> Remedy:
        return Remedy("widen_range", {"from": finding.bound, "to": finding.value, "metric": finding.scope}, why)

    return prescribe
