"""What the rules are about: families, each named by the first letter of its codes."""

from __future__ import annotations

from enum import Enum, IntEnum


class Phase(IntEnum):
    """The phases of a training step, in order. Of two alerts at one step, the earlier phase is the cause."""

    DATA = 0
    FORWARD = 1
    LOSS = 2
    BACKWARD = 3
    UPDATE = 4
    WEIGHTS = 5
    REST = 6
    """Not part of a training step."""


class Family(Enum):
    """Rules about the same thing."""

    LOSS = "L", "loss", Phase.LOSS
    GRADIENTS = "G", "gradients", Phase.BACKWARD
    UPDATES = "U", "updates", Phase.UPDATE
    WEIGHTS = "W", "weights", Phase.WEIGHTS
    ACTIVATIONS = "A", "activations and attention", Phase.FORWARD
    DATA = "D", "data", Phase.DATA
    PERFORMANCE = "P", "performance", Phase.REST
    EVALUATION = "E", "evaluation", Phase.REST
    TASKS = "T", "tasks", Phase.LOSS
    RANKS = "R", "ranks", Phase.DATA
    METRICS = "M", "metrics of your own", Phase.REST
    MONITOR = "X", "the monitor itself", Phase.REST
    OWN = "Z", "rules of your own", Phase.REST
    """Never used by forewarn, so that no later version takes one of your codes."""

    def __init__(self, letter: str, title: str, phase: Phase) -> None:
        self.letter = letter
        """The first letter of every code in the family."""
        self.title = title
        self.phase = phase


BY_LETTER = {family.letter: family for family in Family}


def is_own(code: str) -> bool:
    """Whether this is the code of a user's own rule, loaded or not."""
    return BY_LETTER.get(code[:1]) is Family.OWN
