"""The context of one step: whether it is measured, the facts that probes share, and what is unavailable."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any, TypeVar

from forewarn.measure.over_ranks import Array
from forewarn.types import Reason

Fact = TypeVar("Fact")


class Step:
    """The context of one step. It travels with the step's readings, which on an accelerator are decoded a step later.

    Probes share facts only through it, and only for this step.
    """

    __slots__ = ("_provided", "acted", "each_rank", "ends_epoch", "forwards", "measured", "reasons", "unseen")

    def __init__(self, measured: bool = False, ends_epoch: bool = False) -> None:
        self.measured = measured
        """Whether every tensor is measured; other steps record only what costs next to nothing."""
        self.ends_epoch = ends_epoch
        """Whether this is the end of an epoch, which comes after its last step."""
        self.reasons: dict[str, Reason] = {}
        """By metric: why its reading is missing."""
        self.forwards: defaultdict[int, int] = defaultdict(int)
        """Measured forward passes in training mode, by the id of the module that the loop called."""
        self.acted = 0
        """Number of measured forward passes in training mode without gradients, as when a policy acts."""
        self.unseen: set[int] = set()
        """Indices of the optimizers that used gradients from no backward pass that was seen."""
        self.each_rank: Mapping[str, Array] = {}
        """By label, what each rank says about its own values, once ranks are combined; empty in a single process."""
        self._provided: dict[type, Any] = {}

    def provide(self, fact: object) -> None:
        """Share a fact with the probes that need one of its type."""
        self._provided[type(fact)] = fact

    def get(self, kind: type[Fact]) -> Fact | None:
        """The fact of this type; None if its provider had none for this step, failed or is switched off."""
        return self._provided.get(kind)

    def unavailable(self, metric: str, reason: Reason) -> None:
        """Report why a reading is missing; `Reason.AVAILABLE` withdraws it. May be called on every step."""
        self.reasons[metric] = Reason(reason)
