"""Remedies for alerts: each function here makes a prescription for the `remedies` of a rule."""

from forewarn.judge.remedies.course import roll_back, skip_batch, snapshot, stop, stop_early, train_longer
from forewarn.judge.remedies.model_and_data import (
    add_data,
    add_parameters,
    deepen,
    raise_dropout,
    shift_task_weight,
    shrink,
    smooth_labels,
    widen,
    widen_range,
)
from forewarn.judge.remedies.optimizer import (
    add_to_optimizer,
    clip_gradient,
    exempt_from_decay,
    keep_in_float32,
    lower_beta2,
    lower_weight_decay,
    raise_weight_decay,
)
from forewarn.judge.remedies.prescription import Numbers, Prescription, advise, declared, for_cause
from forewarn.judge.remedies.step_size import (
    decay_lr,
    lower_lr,
    plan_steps,
    raise_lr,
    reduce_on_plateau,
    restore_lr,
    set_lr,
    warm_up,
)

__all__ = [
    "Numbers", "Prescription", "add_data", "add_parameters", "add_to_optimizer", "advise", "clip_gradient",
    "decay_lr", "declared", "deepen", "exempt_from_decay", "for_cause", "keep_in_float32", "lower_beta2",
    "lower_lr", "lower_weight_decay", "plan_steps", "raise_dropout", "raise_lr", "raise_weight_decay",
    "reduce_on_plateau", "restore_lr", "roll_back", "set_lr", "shift_task_weight", "shrink", "skip_batch",
    "smooth_labels", "snapshot", "stop", "stop_early", "train_longer", "warm_up", "widen", "widen_range",
]  # fmt: skip
