"""Gradient accumulation: how many backward passes fill the gradients of one step, and how their norm grows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from forewarn.probes.noise import NoiseScale
from forewarn.probes.probe import ONE, Array, Reading
from forewarn.stats.norms import Norm, norm_of_all


@dataclass(frozen=True, slots=True)
class Passes:
    """The backward passes behind the last update of a step."""

    places: tuple[int, ...]
    """Which of all backward passes of the step they are; those that filled no gradient are not among them."""
    first: Norm | None
    """Norm of the gradients after the first of them; None if it was not read or is of no use."""
    scale: Tensor | None
    """The loss scale that is in that norm."""
    num_forwards: int
    """Forward passes in training mode during the step."""


class Accumulation:
    """Counts the passes that fill gradients on a measured step, and keeps the norm after the first.

    Passes are counted anew after an optimizer has stepped, so a GAN with a pass for each of its optimizers does not
    accumulate. That gradients were cleared in between shows in what was left at the start of each pass.
    """

    def __init__(self, num_optimizers: int) -> None:
        self.expected = False
        """Whether several passes filled the gradients of an earlier measured step."""
        self._num_optimizers = num_optimizers
        self._places: list[int] = []
        self._first: Sequence[Norm] = ()
        self._scale: Tensor | None = None
        self._stepped: set[int] = set()
        """The optimizers that have used these passes."""
        self._rounds = 0
        """Times that passes followed an optimizer step within this step."""
        self._num_forwards = 0
        self._noise = NoiseScale()

    def forward_begins(self) -> None:
        self._num_forwards += 1

    def filled(self, place: int) -> bool:
        """Backward pass number `place` of the step has filled gradients; returns whether it is the first to do so."""
        if self._stepped:
            self._places, self._first, self._stepped = [], (), set()
            self._rounds += 1
        self._places.append(place)
        return len(self._places) == 1

    def keep(self, first: Sequence[Norm], scale: Tensor | None) -> None:
        """Take the norms of all gradients after the first pass, and the loss scale in them."""
        self._first, self._scale = first, scale

    def drop(self) -> None:
        """Forget that norm: it can not be compared with the one at the end."""
        self._first = ()

    def used(self, at: int) -> None:
        """Optimizer number `at` uses what was accumulated."""
        self._stepped.add(at)

    def collect(self) -> Passes:
        """The passes of the step that ends now.

        The norms can be compared where every optimizer used the same passes: else the first is of more tensors.
        """
        whole = self._rounds == 0 and len(self._stepped) == self._num_optimizers and len(self._places) > 1
        first = norm_of_all(self._first) if whole and self._first else None
        passes = Passes(tuple(self._places), first, self._scale, self._num_forwards)
        self._places, self._first, self._scale, self._stepped = [], (), None, set()
        self._rounds = self._num_forwards = 0
        return passes

    def readings(self, passes: Passes, left: Array, first: float, last: float) -> Iterator[Reading]:
        """What is recorded; `left` is what was in the gradients when each pass of the step began."""
        if not passes.places:
            return
        empty = left[list(passes.places)] == 0
        num_passes = len(empty) - int(np.flatnonzero(empty)[-1]) if empty.any() else len(empty)
        self.expected |= num_passes > 1
        yield Reading("gradient/backward_passes", ONE, num_passes)
        if num_passes > 1 and num_passes == len(empty) and empty[0] and first > 0:
            yield Reading("gradient/accumulation_growth", ONE, last / first)
            if passes.num_forwards < num_passes:
                return  # several losses of one forward pass are not several batches
            self._noise.update(num_passes, first, last)
            if not math.isnan(scale := self._noise.value):
                yield Reading("gradient/noise_scale", ONE, scale)

    def state_dict(self) -> dict[str, Any]:
        return {"expected": self.expected, "noise": self._noise.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.expected = bool(state["expected"])
        self._noise.load_state_dict(state["noise"])
