"""Gradient accumulation: how many backward passes contribute to one step, and how the gradient norm grows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from forewarn.measure.engine.norms import Norm, norm_of_all
from forewarn.measure.noise_scale import NoiseScale
from forewarn.measure.probe import ONE, Array, Reading
from forewarn.measure.step import Step
from forewarn.types import Reason


class Passes(NamedTuple):
    """The backward passes behind the last update of a step."""

    places: tuple[int, ...]
    """Their indices among all backward passes of the step; passes that filled no gradient are left out."""
    first: Norm | None
    """Gradient norm after the first of several passes, or of one rank; None if it was not read or is unusable."""
    is_alone: bool
    """Whether `first` is this rank's own norm although the last pass left the mean over all ranks."""
    scale: Tensor | None
    """The loss scale that the norm includes."""


_NONE = Passes((), None, True, None)


class Accumulation:
    """Counts the passes that fill gradients on a measured step, and keeps the norm after the first.

    The count restarts after an optimizer step, so a GAN with one pass per optimizer does not count as accumulating.
    Gradients left at the start of each pass show whether they were cleared in between.
    """

    def __init__(self, num_optimizers: int) -> None:
        self.expected = False
        """Whether several passes filled the gradients of an earlier measured step."""
        self._num_optimizers = num_optimizers
        self._places: list[int] = []
        self._first: Sequence[Norm] = ()
        self._alone: Sequence[Norm] = ()
        self._is_averaged = False
        """Whether the last of these passes ended with the mean over all ranks."""
        self._scale: Tensor | None = None
        self._stepped: set[int] = set()
        """Indices of the optimizers that have used these passes."""
        self._rounds = 0
        """How often a pass followed an optimizer step within this step."""
        self._noise = NoiseScale()

    @property
    def is_under_way(self) -> bool:
        """Whether a pass has filled gradients that no optimizer has used yet."""
        return bool(self._places) and not self._stepped

    def filled(self, place: int, is_averaged: bool) -> bool:
        """Note that backward pass number `place` of the step filled gradients; return whether it is the first."""
        if self._stepped:
            self._places, self._first, self._alone, self._stepped = [], (), (), set()
            self._rounds += 1
        self._places.append(place)
        self._is_averaged = is_averaged
        return len(self._places) == 1

    def keep(self, first: Sequence[Norm], alone: Sequence[Norm], scale: Tensor | None) -> None:
        """Keep the norms of all gradients after the first pass, this rank's own norms, and their loss scale."""
        self._first, self._alone, self._scale = first, alone, scale

    def drop(self) -> None:
        """Forget these norms: they cannot be compared with the final one."""
        self._first = self._alone = ()

    def used(self, index: int) -> None:
        """Note that optimizer number `index` uses the accumulated gradients."""
        self._stepped.add(index)

    def collect(self) -> Passes:
        """The passes of the step that ends now.

        The norms are comparable only if every optimizer used the same passes: otherwise the first covers more tensors.
        """
        if not self._places:  # as on every step without detail
            self._stepped = set()
            return _NONE
        is_comparable = self._rounds == 0 and len(self._stepped) == self._num_optimizers
        is_alone = not (self._first and len(self._places) > 1)
        usable = is_comparable and (self._is_averaged or not is_alone)
        first = self._alone if is_alone else self._first
        norm = norm_of_all(first) if usable and first else None
        passes = Passes(tuple(self._places), norm, is_alone, self._scale)
        self._places, self._first, self._alone, self._scale, self._stepped = [], (), (), None, set()
        self._rounds = 0
        return passes

    def readings(
        self, step: Step, passes: Passes, left: Array, first: float, last: float, num_ranks: int
    ) -> Iterator[Reading]:
        """The readings of one step; `left` holds the gradient norm at the start of each pass."""
        empty = left[list(passes.places)] == 0
        num_passes = len(empty) - int(np.flatnonzero(empty)[-1]) if empty.any() else len(empty)
        self.expected |= num_passes > 1
        yield Reading("gradient/backward_passes", ONE, num_passes)
        is_comparable = num_passes == len(empty) and bool(empty[0]) and first > 0
        if is_comparable and not passes.is_alone:
            yield Reading("gradient/accumulation_growth", ONE, last / first)
        if (
            is_comparable and max(step.forwards.values(), default=0) >= num_passes
        ):  # two losses of one forward pass are not two batches
            per_pass = num_ranks if passes.is_alone else 1
            self._noise.update(num_passes * per_pass, first, last * per_pass, per_pass)
            step.unavailable("gradient/noise_scale", Reason.AVAILABLE)
            if not math.isnan(scale := self._noise.value):
                yield Reading("gradient/noise_scale", ONE, scale)
        elif num_ranks > 1 and passes.first is None:
            step.unavailable("gradient/noise_scale", Reason.RANK_GRADIENT_UNSEEN)
        elif num_passes == 1:
            step.unavailable("gradient/noise_scale", Reason.ONE_BATCH)

    def state_dict(self) -> dict[str, Any]:
        return {"expected": self.expected, "noise": self._noise.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.expected = bool(state["expected"])
        self._noise.load_state_dict(state["noise"])
