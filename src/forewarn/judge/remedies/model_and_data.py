"""Remedies for the model, the data, the weights of tasks and the healthy range of a metric."""

from __future__ import annotations

import math

from forewarn.judge.headlines import filled
from forewarn.judge.history import History
from forewarn.judge.remedies.prescription import Numbers, Prescription, change, declared
from forewarn.types import Finding, Remedy, RunInfo, in_words

_LARGEST_SHIFT = 5  # powers of two by which a task weight may change at once: × 32
_FIRST_DROPOUT = 0.1  # for models without dropout (Srivastava et al. 2014 use more, transformers 0.1)
_MOST_DROPOUT = 0.5
_SMOOTHING = 0.1  # the usual value (Szegedy et al. 2016, Vaswani et al. 2017)
_WIDTHS = ("width", "hidden_size", "hidden_dim", "d_model", "n_embd", "embed_dim")
_DEPTHS = ("depth", "num_layers", "num_hidden_layers", "n_layer", "layers")
_SAMPLES = ("num_samples", "train_samples", "dataset_size")


def raise_dropout(why: str = "dropout makes it harder to memorize single samples") -> Prescription:
    """More dropout: 0.1 if there is none, else half as much again; None if it is at its maximum already."""

    def prescribe(finding: Finding, history: History, info: RunInfo) -> Remedy | None:
        now = declared(info, "dropout", "dropout_rate", "dropout_p")
        if math.isnan(now):
            return Remedy("raise_dropout", {"to": _FIRST_DROPOUT}, why, do=f"Add dropout of {_FIRST_DROPOUT}")
        to = _FIRST_DROPOUT if now < _FIRST_DROPOUT else min(_MOST_DROPOUT, round(1.5 * now, 2))
        numbers: Numbers = {"from": now, "to": to}
        return Remedy("raise_dropout", numbers, why, do=change("Raise", "dropout", numbers)) if to > now else None

    return prescribe


def add_data(why: str = "more samples are harder to memorize") -> Prescription:
    """Twice the samples, or augmentation that makes up for them."""

    def prescribe(finding: Finding, history: History, info: RunInfo) -> Remedy:
        now = declared(info, *_SAMPLES)
        if math.isnan(now):
            return Remedy("add_data", {"factor": 2}, why, do="Train on twice as much data, or augment it")
        numbers: Numbers = {"from": now, "to": 2 * now}
        do = filled("Train on {to} samples instead of {from}, or augment them", numbers)
        return Remedy("add_data", numbers, why, do=do)

    return prescribe


def smooth_labels(
    why: str = "the model is then no longer rewarded for being certain of single samples",
) -> Prescription:
    """Label smoothing of 0.1, which fits where the targets are classes; None if it is used already."""

    def prescribe(finding: Finding, history: History, info: RunInfo) -> Remedy | None:
        now = declared(info, "label_smoothing")
        if now >= _SMOOTHING:
            return None
        do = f"If the targets are classes, use `CrossEntropyLoss(label_smoothing={_SMOOTHING})`"
        return Remedy("smooth_labels", {"to": _SMOOTHING}, why, do=do)

    return prescribe


def shrink(why: str = "a smaller model has less room to memorize") -> Prescription:
    """Half the declared width; otherwise half the parameters."""

    def prescribe(finding: Finding, history: History, info: RunInfo) -> Remedy:
        width = declared(info, *_WIDTHS)
        now = info.num_parameters if math.isnan(width) else width
        numbers: Numbers = {"from": now, "to": now // 2} if now else {"factor": 0.5}
        quantity = "the number of parameters" if math.isnan(width) else "the width"
        return Remedy("shrink", numbers, why, do=change("Lower", quantity, numbers))

    return prescribe


def widen(why: str = "a model that is too small cannot fit the data") -> Prescription:
    """Twice the declared width; None if it is not declared."""

    def prescribe(finding: Finding, history: History, info: RunInfo) -> Remedy | None:
        now = declared(info, *_WIDTHS)
        numbers: Numbers = {"from": now, "to": 2 * now}
        return None if math.isnan(now) else Remedy("widen", numbers, why, do=change("Raise", "the width", numbers))

    return prescribe


def deepen(why: str = "more layers can represent more") -> Prescription:
    """Half as many blocks again, as declared or as found in the model; None if there are none."""

    def prescribe(finding: Finding, history: History, info: RunInfo) -> Remedy | None:
        named = declared(info, *_DEPTHS)
        now = info.depth if math.isnan(named) else named
        if not now > 0:
            return None
        numbers: Numbers = {"from": now, "to": now + max(1, now // 2)}
        return Remedy("deepen", numbers, why, do=change("Raise", "the number of blocks", numbers))

    return prescribe


def add_parameters(why: str = "a model that is too small cannot fit the data") -> Prescription:
    """Twice the parameters; None if the width or the depth is known, since those say more."""

    def prescribe(finding: Finding, history: History, info: RunInfo) -> Remedy | None:
        if info.depth or not math.isnan(declared(info, *_WIDTHS, *_DEPTHS)):
            return None
        now = info.num_parameters
        numbers: Numbers = {"from": now, "to": 2 * now} if now else {"factor": 2}
        return Remedy("add_parameters", numbers, why, do=change("Raise", "the number of parameters", numbers))

    return prescribe


def shift_task_weight(raised: bool, why: str) -> Prescription:
    """Raise the weight of the starved task, or lower that of the dominating one, to close half of the gap.

    The factor is the power of two nearest the square root of their ratio, so that both changes together balance them.
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
        do = change("Raise" if raised else "Lower", f"the weight of task {task}", numbers or {"factor": factor})
        return Remedy(action, {**numbers, "task": task, "by": f"× {in_words(factor)}"}, why, do=do)

    return prescribe


def widen_range(why: str) -> Prescription:
    """Move the exceeded limit to the value of the finding."""

    def prescribe(finding: Finding, history: History, info: RunInfo) -> Remedy:
        numbers: Numbers = {"from": finding.bound, "to": finding.value, "metric": finding.scope}
        do = filled("Move the limit of this metric from {from} to {to}", numbers)
        return Remedy("widen_range", numbers, why, do=do)

    return prescribe
