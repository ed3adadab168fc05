"""What is judged, one file per family; importing this package registers every rule."""

from forewarn.rules import (
    activations,
    attention,
    evaluation,
    gain,
    gradients,
    learning,
    logits,
    loss,
    lr,
    metrics,
    monitor,
    router,
    tasks,
    updates,
    weights,
)  # fmt: skip
from forewarn.rules.registry import Judge, Judgement, Rule, all_rules, enabled_rules, find_rule

__all__ = [
    "Judge",
    "Judgement",
    "Rule",
    "activations",
    "all_rules",
    "attention",
    "enabled_rules",
    "evaluation",
    "find_rule",
    "gain",
    "gradients",
    "learning",
    "logits",
    "loss",
    "lr",
    "metrics",
    "monitor",
    "router",
    "tasks",
    "updates",
    "weights",
]
