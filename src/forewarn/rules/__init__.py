"""What is judged, one file per family; importing this package registers every rule."""

from forewarn.rules import gain, gradients, loss, lr, monitor, updates, weights
from forewarn.rules.registry import Judge, Judgement, Rule, all_rules, enabled_rules, find_rule

__all__ = [
    "Judge",
    "Judgement",
    "Rule",
    "all_rules",
    "enabled_rules",
    "find_rule",
    "gain",
    "gradients",
    "loss",
    "lr",
    "monitor",
    "updates",
    "weights",
]
