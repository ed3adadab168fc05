"""What helps a run that no longer learns, or learns the wrong thing: remedies from what is declared about the model."""

from __future__ import annotations

import math

from forewarn.history import History
from forewarn.remedies import Prescription, current_lr
from forewarn.types import Facts, Finding, Remedy

_FIRST_DROPOUT = 0.1  # where there is none yet (Srivastava et al. 2014 use more, transformers 0.1)
_MOST_DROPOUT = 0.5
_FIRST_WEIGHT_DECAY = 0.01  # AdamW's own default
_USUAL_WEIGHT_DECAY = 0.1  # what large models train with (GPT-3, Llama)
_FLOOR_SHARE = 0.1  # of the peak, where a cosine usually ends
_WIDTHS = ("width", "hidden_size", "hidden_dim", "d_model", "n_embd", "embed_dim")
_DEPTHS = ("depth", "num_layers", "num_hidden_layers", "n_layer", "layers")
_SAMPLES = ("num_samples", "train_samples", "dataset_size")
_EPOCHS = ("epochs", "num_epochs")
_STEPS = ("total_steps", "max_steps")


def raise_dropout(why: str = "units that may be missing can not learn single samples by heart") -> Prescription:
    """More dropout: 0.1 where there is none, else half as much again; None where there is much already."""

    def prescribe(finding: Finding, history: History, facts: Facts) -> Remedy | None:
        now = declared(facts, "dropout", "dropout_rate", "dropout_p")
        if math.isnan(now):
            return Remedy("raise_dropout", {"to": _FIRST_DROPOUT}, why)
        to = _FIRST_DROPOUT if now < _FIRST_DROPOUT else min(_MOST_DROPOUT, round(1.5 * now, 2))
        return Remedy("raise_dropout", {"from": now, "to": to}, why) if to > now else None

    return prescribe


def raise_weight_decay(why: str = "small weights fit the pattern rather than the noise") -> Prescription:
    """More weight decay: 0.01 where there is none, then 0.1, then twice as much."""

    def prescribe(finding: Finding, history: History, facts: Facts) -> Remedy:
        now = max((group.get("weight_decay", 0.0) for group in facts.groups), default=0.0)
        if now < _FIRST_WEIGHT_DECAY:
            to = _FIRST_WEIGHT_DECAY
        else:
            to = _USUAL_WEIGHT_DECAY if now < _USUAL_WEIGHT_DECAY else 2 * now
        return Remedy("raise_weight_decay", {"from": now, "to": to}, why, safety="opt_in")

    return prescribe


def decay_lr(why: str = "small steps at the end find what large ones jump over") -> Prescription:
    """Let the learning rate fall to a tenth of what it is, over the steps that are left where that is declared."""

    def prescribe(finding: Finding, history: History, facts: Facts) -> Remedy | None:
        now = current_lr(history, facts)
        if now == 0:
            return None
        numbers: dict[str, float | str] = {"shape": "cosine"}
        if not math.isnan(now):
            numbers |= {"from": now, "to": _FLOOR_SHARE * now}
        total = declared(facts, *_STEPS)
        if total > finding.step + 1:
            numbers["steps"] = total - finding.step - 1
        return Remedy("decay_lr", numbers, why)

    return prescribe


def stop_early(why: str = "the weights of the best evaluation are the best of this run") -> Prescription:
    """Stop, and take the weights of the evaluation that was best."""

    def prescribe(finding: Finding, history: History, facts: Facts) -> Remedy:
        losses = history.series("eval/loss")
        finite = [(float(loss), int(step)) for loss, step in zip(losses.values, losses.steps, strict=True)]
        best = min((each for each in finite if math.isfinite(each[0])), default=None)
        if best is None:
            return Remedy("stop_early", {"step": finding.step}, why)
        return Remedy("stop_early", {"best_step": best[1], "best_loss": best[0]}, why)

    return prescribe


def add_data(why: str = "what must fit more samples can not learn each of them by heart") -> Prescription:
    """Twice the samples, or augmentation that makes up for them."""

    def prescribe(finding: Finding, history: History, facts: Facts) -> Remedy:
        now = declared(facts, *_SAMPLES)
        return Remedy("add_data", {"factor": 2} if math.isnan(now) else {"from": now, "to": 2 * now}, why)

    return prescribe


def widen(why: str = "a model that is too small for the task fits neither set") -> Prescription:
    """Twice the width where it is declared; None elsewhere."""

    def prescribe(finding: Finding, history: History, facts: Facts) -> Remedy | None:
        now = declared(facts, *_WIDTHS)
        return None if math.isnan(now) else Remedy("widen", {"from": now, "to": 2 * now}, why)

    return prescribe


def deepen(why: str = "more layers make more of the same width") -> Prescription:
    """Half as many blocks again, by what is declared or was found in the model; None if it has none."""

    def prescribe(finding: Finding, history: History, facts: Facts) -> Remedy | None:
        named = declared(facts, *_DEPTHS)
        now = facts.depth if math.isnan(named) else named
        return Remedy("deepen", {"from": now, "to": now + max(1, now // 2)}, why) if now > 0 else None

    return prescribe


def add_parameters(why: str = "a model that is too small for the task fits neither set") -> Prescription:
    """Twice the parameters; None where the width or the depth is known, which say it better."""

    def prescribe(finding: Finding, history: History, facts: Facts) -> Remedy | None:
        if facts.depth or not math.isnan(declared(facts, *_WIDTHS, *_DEPTHS)):
            return None
        now = facts.num_parameters
        return Remedy("add_parameters", {"from": now, "to": 2 * now} if now else {"factor": 2}, why)

    return prescribe


def train_longer(why: str = "the loss still falls a little in every epoch") -> Prescription:
    """Twice the epochs or steps that are declared, else twice the steps done so far."""

    def prescribe(finding: Finding, history: History, facts: Facts) -> Remedy:
        epochs, steps = declared(facts, *_EPOCHS), declared(facts, *_STEPS)
        what, now = ("epochs", epochs) if not math.isnan(epochs) else ("steps", steps)
        now = finding.step + 1 if math.isnan(now) else now
        return Remedy("train_longer", {"from": now, "to": 2 * now, "in": what}, why)

    return prescribe


def plan_steps(why: str = "a schedule ends well only if it ends with the training") -> Prescription:
    """The number of steps that the schedule is made for, and the number that it must be made for."""

    def prescribe(finding: Finding, history: History, facts: Facts) -> Remedy:
        planned = finding.evidence.get("ended", declared(facts, *_STEPS))
        needed = finding.evidence.get("steps_needed", finding.step + 1)
        known = isinstance(planned, int | float) and not math.isnan(planned) and planned != needed
        return Remedy("plan_steps", {"from": planned, "to": needed} if known else {"to": needed}, why)

    return prescribe


def declared(facts: Facts, *names: str) -> float:
    """The first of these that the user declared as a number; NaN if none is."""
    return next((value for name in names if not math.isnan(value := _number(facts, name))), math.nan)


def _number(facts: Facts, name: str) -> float:
    value = facts.hyperparameters.get(name)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
