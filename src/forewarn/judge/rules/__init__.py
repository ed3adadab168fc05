"""What is judged, one file per family; importing this package registers every rule."""

from forewarn.judge.registry import Judge, Judgement, Rule, all_rules, enabled_rules, find_rule, judged_metrics
from forewarn.judge.rules import (
    activations,
    attention,
    evaluation,
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
    "Judge", "Judgement", "Rule", "activations", "all_rules", "attention", "enabled_rules", "evaluation", "find_rule",
    "gain", "gradients", "judged_metrics", "logits", "loss", "loss_levels", "lr", "module_metrics", "monitoring",
    "router", "tasks", "updates", "weights",
]  # fmt: skip
