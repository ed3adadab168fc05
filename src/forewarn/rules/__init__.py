"""What is judged, one file per family; importing this package registers every rule."""

from forewarn.rules import activations, attention, gradients, logits, loss, monitor, router, updates, weights
from forewarn.rules.registry import Judge, Judgement, Rule, all_rules, enabled_rules, find_rule

__all__ = [
    "Judge",
    "Judgement",
    "Rule",
    "activations",
    "all_rules",
    "attention",
    "enabled_rules",
    "find_rule",
    "gradients",
    "logits",
    "loss",
    "monitor",
    "router",
    "updates",
    "weights",
]
