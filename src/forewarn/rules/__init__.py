"""What is judged, one file per family; importing this package registers every rule."""

from forewarn.rules import evaluation, gain, gradients, learning, loss, lr, monitor, tasks, updates, weights
from forewarn.rules.registry import Judge, Judgement, Rule, all_rules, enabled_rules, find_rule

__all__ = [
    "Judge",
    "Judgement",
    "Rule",
    "all_rules",
    "enabled_rules",
    "evaluation",
    "find_rule",
    "gain",
    "gradients",
    "learning",
    "loss",
    "lr",
    "monitor",
    "tasks",
    "updates",
    "weights",
]
