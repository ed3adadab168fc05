"""What a probe is: something that sees the events of a training loop and turns them into readings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch.optim import Optimizer

from forewarn.stats import Numbers

Array = NDArray[np.float64]


class Reading(NamedTuple):
    """One metric for all its scopes, before it knows its step."""

    name: str
    scopes: tuple[str, ...]
    values: Any


def merged(readings: Iterable[Reading]) -> list[Reading]:
    """One reading per name: what several probes say under the same name becomes one with all their scopes."""
    by_name: dict[str, Reading] = {}
    for one in readings:
        known = by_name.get(one.name)
        by_name[one.name] = one if known is None else _joined(known, one)
    return list(by_name.values())


def _joined(first: Reading, second: Reading) -> Reading:
    """Both under one name; of two values for the same scope the later one stands."""
    values: dict[str, float] = {}
    for each in (first, second):
        values |= zip(each.scopes, np.asarray(each.values, np.float64).reshape(len(each.scopes)), strict=True)
    return Reading(first.name, tuple(values), list(values.values()))


ONE: tuple[str, ...] = ("",)
"""The scope of a metric of the run as a whole."""


@dataclass(frozen=True, slots=True)
class Pending:
    """Readings whose values may still be on a device, and how to make them once those values have arrived."""

    tensors: Sequence[Numbers] = ()
    decode: Callable[[Sequence[Array]], Iterable[Reading]] = field(default=lambda _: ())
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
