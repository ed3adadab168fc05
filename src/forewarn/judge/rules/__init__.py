"""The rules, one file per family; importing this package registers all of them."""

from forewarn.judge.registry import Rule, all_rules, enabled_rules, family_of, find_rule
from forewarn.judge.rules import (
    activations,
    attention,
    epoch_schedule,
    evaluation,
    first_epoch,
    frozen,
    gain,
    gradients,
    logits,
    loss,
    loss_levels,
    lr,
    module_metrics,
    monitoring,
    router,
    tasks,
    updates,
    weights,
)

__all__ = [
    "Rule", "activations", "all_rules", "attention", "enabled_rules", "epoch_schedule", "evaluation", "family_of",
    "find_rule", "first_epoch", "frozen", "gain", "gradients", "logits", "loss", "loss_levels", "lr", "module_metrics",
    "monitoring", "router", "tasks", "updates", "weights",
]  # fmt: skip
