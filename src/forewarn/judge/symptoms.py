"""What people see when training goes wrong, with the guide page about it and the rules that find the cause."""

from __future__ import annotations

from typing import NamedTuple

GUIDE = "docs/guide"


class Symptom(NamedTuple):
    """Something that people notice, with or without forewarn."""

    page: str
    """The page of the guide, in `docs/guide`."""
    title: str
    """The symptom as a sentence without a period."""
    rules: tuple[str, ...] = ()
    """Names of rules that find its cause, the most likely first."""

    @property
    def path(self) -> str:
        return f"{GUIDE}/{self.page}.md"


SYMPTOMS = (
    Symptom("nan-loss", "The loss is NaN or infinite",
            ("non-finite-loss", "non-finite-gradient", "non-finite-weight", "exploding-activation",
             "non-finite-metric", "epsilon-underflow")),
    Symptom("loss-not-decreasing", "The loss does not fall and the model does not learn",
            ("loss-not-starting", "optimizer-not-stepping", "loss-plateau", "first-epoch-flat",
             "accumulating-gradient", "parameter-not-in-optimizer", "loss-bouncing", "underfitting",
             "lr-off-plan", "update-ratio-low", "clip-too-tight", "weight-decay-dominates", "epsilon-dominates",
             "double-softmax", "inputs-not-normalized", "stale-copy",
             "gradient-changed-before-step")),
    Symptom("loss-spikes", "The loss spikes, rises or diverges",
            ("loss-spike", "loss-divergence", "gradient-spike", "update-ratio-jump", "update-ratio-high",
             "first-epoch-spike", "loss-bouncing", "lr-jump-on-resume", "attention-logit-growth", "loss-shift",
             "loss-above-start", "sorted-data", "loss-without-floor")),
    Symptom("plateau", "The loss has reached a plateau",
            ("loss-plateau", "validation-plateau", "slow-improvement", "lr-spent", "schedule-mismatch")),
    Symptom("validation-rises", "The validation loss rises",
            ("validation-rising", "overfitting", "generalization-gap", "validation-plateau", "batchnorm-in-eval",
             "repeated-batch")),
    Symptom("layer-not-learning", "One layer does not learn",
            ("frozen-weight", "parameter-not-in-optimizer", "missing-gradient", "dead-units", "update-ratio-low",
             "gradient-fades-with-depth", "dead-expert", "weight-norms-apart", "mostly-frozen")),
    Symptom("exploding-gradients", "Gradients explode",
            ("exploding-gradient", "gradient-spike", "gain-too-high", "gain-drift", "accumulating-gradient",
             "gradient-changed-before-step", "gradient-imbalance")),
    Symptom("vanishing-gradients", "Gradients vanish",
            ("vanishing-gradient", "gradient-fades-with-depth", "gradient-decay", "saturated-units", "dead-units")),
    Symptom("slow-training", "Training is slow: each step takes long",
            ("throughput-drop", "data-starved", "slow-step", "gpu-underused", "stalled-run")),
    Symptom("out-of-memory", "Training runs out of memory", ("out-of-memory", "memory-leak", "memory-high")),
)  # fmt: skip


def guides_of(rule: str) -> list[Symptom]:
    """The symptoms whose guide page covers this rule, the best match first."""
    about = [symptom for symptom in SYMPTOMS if rule in symptom.rules]
    return sorted(about, key=lambda symptom: symptom.rules.index(rule))


SYNONYMS = {
    "amp": "bfloat16 scaler", "bf16": "bfloat16 rounding", "big": "large", "blow": "diverge",
    "change": "move", "constant": "plateau flat", "converge": "fall learn", "cuda": "memory", "decrease": "fall",
    "detach": "missing", "disappear": "vanish", "diverge": "rise", "down": "fall", "drop": "fall", "dying": "dead",
    "early": "first", "eval": "validation", "explode": "large diverge", "explosion": "explode", "flat": "plateau",
    "fp16": "bfloat16 rounding", "freeze": "frozen", "generalise": "overfitting", "generalize": "overfitting",
    "grad": "gradient", "grow": "rise", "hang": "slow", "high": "large", "huge": "large", "improve": "fall",
    "increase": "rise", "inf": "infinite", "infinity": "infinite", "jump": "spike", "large": "high", "leak": "memory",
    "low": "small", "lr": "learning rate", "memorise": "overfitting", "memorize": "overfitting",
    "moe": "expert router", "multi": "task", "multitask": "task", "neuron": "unit", "noisy": "bounce",
    "none": "missing", "oom": "memory", "oscillate": "bounce", "overflow": "infinite",
    "precision": "rounding bfloat16", "ram": "memory", "same": "alike", "scheduler": "schedule", "small": "low",
    "speed": "slow", "stagnate": "plateau", "stall": "plateau", "stay": "plateau", "stuck": "plateau",
    "sudden": "spike", "test": "validation", "throughput": "slow", "tiny": "small", "underflow": "rounding vanish",
    "unstable": "spike diverge", "up": "rise", "update": "move", "val": "validation", "vram": "memory",
    "warmup": "warm", "zero": "vanish",
}  # fmt: skip
"""Synonyms for the words of rules and pages."""
