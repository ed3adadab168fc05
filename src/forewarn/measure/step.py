"""The context of one step: whether it is measured, the facts that probes share, and what is unavailable."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from forewarn.measure.over_ranks import Array
from forewarn.types import Reason

if TYPE_CHECKING:
    from forewarn.measure.stages import OtherStages

Fact = TypeVar("Fact")


class Step:
    """The context of one step. It travels with the step's readings, which on an accelerator are decoded a step later.

    Probes share facts only through it, and only for this step.
    """

    __slots__ = (
        "_provided", "acted", "each_rank", "ends_epoch", "first_rank", "for_other_stages", "forwards", "is_fed",
        "measured", "other_stages", "ranks", "reasons", "unseen",
    )  # fmt: skip

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
        self.ranks: Sequence[int] = ()
        """The ranks whose values these are, in their order; with pipeline stages, those of one stage."""
        self.first_rank = 0
        """The first of the ranks that this rank took for copies of its model, when it measured the step."""
        self.is_fed = False
        """Whether an input requires a gradient but comes from no operation, as what a pipeline stage receives."""
        self.other_stages: OtherStages | None = None
        """The readings of the other pipeline stages, on the rank that records; None without stages."""
        self.for_other_stages: dict[str, float] = {}
        """Numbers for the rank that records, beside the readings of this stage."""
        self._provided: dict[type, Any] = {}

    def whole_norm(self, name: str, norm: float) -> float:
        """The norm over all pipeline stages; NaN if one of them has none. It is a metric, or else sent as a number."""
        if "/" not in name:
            self.for_other_stages[name] = norm
        return norm if self.other_stages is None else self.other_stages.norm(name, norm)

    def with_other_stages(self, metric: str, values: Array) -> Array:
        """The values of a metric with those of the other pipeline stages."""
        if self.other_stages is None:
            return values
        return np.concatenate([np.asarray(values, np.float64).ravel(), self.other_stages.values(metric)])

    def provide(self, fact: object) -> None:
        """Share a fact with the probes that need one of its type."""
        self._provided[type(fact)] = fact

    def get(self, kind: type[Fact]) -> Fact | None:
        """The fact of this type; None if its provider had none for this step, failed or is switched off."""
        return self._provided.get(kind)

    def unavailable(self, metric: str, reason: Reason) -> None:
        """Report why a reading is missing; `Reason.AVAILABLE` withdraws it. May be called on every step."""
        self.reasons[metric] = reason if type(reason) is Reason else Reason(reason)  # the call takes a microsecond
