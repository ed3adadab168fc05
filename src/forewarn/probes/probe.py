"""What a probe is: something that sees the events of a training loop and turns them into readings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch.optim import Optimizer

from forewarn.stats import Numbers
from forewarn.types import Counts

Array = NDArray[np.float64]


class Reading(NamedTuple):
    """One metric for all its scopes, before it knows its step."""

    name: str
    scopes: tuple[str, ...]
    values: Any


class Histograms(NamedTuple):
    """The histograms of one metric for all its scopes, before they know their step."""

    name: str
    scopes: tuple[str, ...]
    counts: Counts
    """[n × 2 × bins]: negative and positive values by the power of two of their magnitude."""
    zeros: Counts


ONE: tuple[str, ...] = ("",)
"""The scope of a metric of the run as a whole."""


@dataclass(frozen=True, slots=True)
class Pending:
    """Readings whose values may still be on a device, and how to make them once those values have arrived."""

    tensors: Sequence[Numbers] = ()
    decode: Callable[[Sequence[Array]], Iterable[Reading | Histograms]] = field(default=lambda _: ())
    """Takes one float64 array of the same shape per tensor."""


class Probe:
    """Base of all probes; a probe overrides the events it needs. Whatever it raises switches it off, never the run.

    Nothing here may draw random numbers, change a tensor or wait for the device.
    """

    name = ""

    def backward_begins(self, measured: bool) -> None:
        """The first gradient of a backward pass through the model is about to be computed."""

    def backward_ended(self, measured: bool) -> None:
        """All gradients of a backward pass through the model have been accumulated."""

    def before_update(self, at: int, optimizer: Optimizer, measured: bool, closure: bool) -> None:
        """Optimizer number `at` is about to step; with a closure, gradients do not exist yet."""

    def after_update(self, at: int, optimizer: Optimizer, measured: bool, closure: bool) -> None:
        """Optimizer number `at` has stepped."""

    def collect(self, measured: bool) -> Pending | None:
        """The readings of the step that ends now; called once per `monitor.step`."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """What must survive a resume."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave."""
