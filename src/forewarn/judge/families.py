"""What the rules are about: families, each named by the first letter of its codes."""

from __future__ import annotations

from enum import Enum, IntEnum


class Phase(IntEnum):
    """Where in a training step something is met, in order: of two alerts of one step the earlier is the cause."""

    FORWARD = 0
    LOSS = 1
    BACKWARD = 2
    UPDATE = 3
    WEIGHTS = 4
    REST = 5
    """What belongs to no place in a step."""


class Family(Enum):
    """Rules about the same thing."""

    LOSS = "L", "loss", Phase.LOSS
    GRADIENTS = "G", "gradients", Phase.BACKWARD
    UPDATES = "U", "updates", Phase.UPDATE
    WEIGHTS = "W", "weights", Phase.WEIGHTS
    ACTIVATIONS = "A", "activations and attention", Phase.FORWARD
    EVALUATION = "E", "evaluation", Phase.REST
    TASKS = "T", "tasks", Phase.LOSS
    METRICS = "M", "metrics of your own", Phase.REST
    MONITOR = "X", "the monitor itself", Phase.REST
    OWN = "Z", "rules of your own", Phase.REST
    """Never used by forewarn, so that no later version takes a code of yours."""

    def __init__(self, letter: str, title: str, phase: Phase) -> None:
        self.letter = letter
        """The first of every code of the family."""
        self.title = title
        self.phase = phase


BY_LETTER = {family.letter: family for family in Family}


def is_own(code: str) -> bool:
    """Whether this is the code of a rule of the user's own, loaded or not."""
    return BY_LETTER.get(code[:1]) is Family.OWN
