"""What a workload is: a small training script, and what kinds of faults it has room for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from forewarn.lab.faults.session import Session

Script = Callable[[Session], float]
"""Trains a model, and returns what it was worth on clean held-out data; lower is better."""


class Trait(StrEnum):
    """What a script has that a change may need."""

    CLASSES = "classes"
    """The model's output are the logits of classes, and targets are their numbers."""
    TARGETS = "targets"
    """It learns from pairs of inputs and targets that can be mixed up."""
    FLOATS = "floats"
    """Its inputs are floating-point numbers."""
    TOKENS = "tokens"
    """It has an embedding of tokens."""
    ORDER = "order"
    """It visits samples in an order, and each has one class."""
    EPOCHS = "epochs"
    """It visits all samples in each epoch, and ends it with a validation loss."""
    RELU = "relu"
    TANH = "tanh"
    BATCH_NORM = "batch norm"
    ATTENTION = "attention"
    WARM_UP = "warm-up"
    SCHEDULE = "schedule"
    """It has a scheduler of torch."""
    ADAM = "adam"
    """Its optimizer has an epsilon."""
    WEIGHT_DECAY = "weight decay"
    STATELESS = "stateless"
    """Its optimizer keeps nothing from step to step."""
    ACCUMULATION = "accumulation"
    SMOOTHING = "label smoothing"
    VARIATIONAL = "variational"
    ANNEALED = "annealed"
    """A weight in its loss rises over the run."""
    FULL_BATCH = "full batch"
    """Every step sees all data."""
    PLAYERS = "two players"
    REINFORCEMENT = "reinforcement"
    POLICY = "policy"
    """It learns a policy with an entropy."""
    TARGET_NETWORK = "target network"
    TASKS = "two tasks"
    ROUTER = "router"


@dataclass(frozen=True, slots=True)
class Workload:
    """A training script with its facts."""

    name: str
    kind: str
    """Workloads of one kind belong to one set, so that a score is about kinds that no rule was tuned on."""
    script: Script
    num_steps: int
    traits: frozenset[Trait]
    summary: str
    """What trains here, in one line."""


def workload(name: str, *, kind: str = "", num_steps: int, traits: set[Trait]) -> Callable[[Script], Workload]:
    """Make a script a workload."""

    def declare(script: Script) -> Workload:
        summary = (script.__doc__ or "").partition("\n")[0]
        return Workload(name, kind or name, script, num_steps, frozenset(traits), summary)

    return declare
