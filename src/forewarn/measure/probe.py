"""What a probe is: something that sees the events of a training loop and turns them into readings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer

from forewarn.measure.engine import Numbers
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


class GradientTap(NamedTuple):
    """A tensor of the forward pass, or a parameter, that a probe follows into the backward pass."""

    tensor: Tensor
    reached: Callable[[Tensor], None]
    """Takes the gradient of the loss with respect to the tensor; of a parameter, before it is added to `.grad`."""


@dataclass(frozen=True, slots=True)
class ModuleTap:
    """A module that a probe wants to look at, and what to call as it is entered and left.

    Both may return tensors to follow into the backward pass.
    """

    module: nn.Module
    entered: Callable[[tuple[Any, ...], dict[str, Any]], Iterable[GradientTap] | None] | None = None
    """Takes the arguments."""
    left: Callable[[tuple[Any, ...], dict[str, Any], Any], Iterable[GradientTap] | None] | None = None
    """Takes the arguments and the output."""


class Probe:
    """Base of all probes; a probe overrides the events it needs. Whatever it raises switches it off, never the run.

    Nothing here may draw random numbers, change a tensor or wait for the device.
    """

    name = ""

    def forward_begins(self) -> None:
        """A forward pass of the model, in training mode and on a measured step, is about to run."""

    def module_taps(self) -> Sequence[ModuleTap]:
        """Where to look while that pass runs."""
        return ()

    def forward_ended(self, output: Any) -> None:
        """That pass is over, also when it or this probe failed; `output` is None if it raised."""

    def needs_every_backward(self) -> bool:
        """Whether a probe that overrides the next ones has a use for them even if this step is not measured."""
        return True

    def backward_begins(self, measured: bool) -> None:
        """The first gradient of a backward pass through the model is about to be computed."""

    def gradient_taps(self) -> Sequence[GradientTap]:
        """Parameters whose gradients to see in the pass that begins, on a measured step; let go at its end."""
        return ()

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
