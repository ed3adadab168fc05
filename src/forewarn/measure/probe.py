"""Probes: they see the events of a training loop and turn them into readings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from forewarn.catalogue import Metric
from forewarn.measure.engine import Value
from forewarn.measure.over_ranks import Array as Array
from forewarn.measure.over_ranks import Part
from forewarn.measure.step import Step
from forewarn.types import Counts


class Reading(NamedTuple):
    """The values of one metric for all its scopes, without a step."""

    name: str
    scopes: tuple[str, ...]
    values: Any


class Histograms(NamedTuple):
    """The histograms of one metric for all its scopes, without a step."""

    name: str
    scopes: tuple[str, ...]
    counts: Counts
    """[n × 2 × bins]: negative and positive values by the power of two of their magnitude."""
    zeros: Counts


ONE: tuple[str, ...] = ("",)
"""The scope of a metric that describes the whole run."""


def _nothing(arrays: Sequence[Array]) -> Iterable[Reading | Histograms]:
    return ()


class Pending(NamedTuple):
    """Readings whose values may still be on a device, and how to decode them once they have arrived."""

    tensors: Sequence[Value] = ()
    """A number that is known already may be a float."""
    decode: Callable[[Sequence[Array]], Iterable[Reading | Histograms]] = _nothing
    """Takes one float64 array per tensor, of the same shape; on an accelerator, one step later."""
    parts: Sequence[Part] = ()
    """How each tensor is combined over ranks; those without an entry stay as this rank has measured them."""
    settle: Callable[[Sequence[Array]], Pending] | None = None
    """In a distributed run: makes what is exchanged instead from the arrays, once they have arrived."""


class GradientTap(NamedTuple):
    """A tensor of the forward pass, or a parameter, that a probe follows into the backward pass."""

    tensor: Tensor
    reached: Callable[[Tensor], None]
    """Takes the gradient of the loss with respect to the tensor; for a parameter, before it is added to `.grad`."""


@dataclass(frozen=True, slots=True)
class ModuleTap:
    """A module that a probe observes, and what to call before and after its forward.

    Both may return tensors to follow into the backward pass.
    """

    module: nn.Module
    entered: Callable[[tuple[Any, ...], dict[str, Any]], Iterable[GradientTap] | None] | None = None
    """Takes the arguments."""
    left: Callable[[tuple[Any, ...], dict[str, Any], Any], Iterable[GradientTap] | None] | None = None
    """Takes the arguments and the output."""


class Probe:
    """Base of all probes. A simple one has a `name` and overrides `collect`; others override the events they need.

    A probe that raises is switched off; its exception never reaches the run. A probe must not draw random numbers,
    change a tensor or wait for the device. Probes share facts only through the `Step` and never hold each other. They
    are called in an order that follows from `provides` and `needs`.
    """

    name = ""
    metrics: Sequence[Metric] | None = None
    """The metrics that a user's own probe records, in a family that no built-in probe uses; None for built-in ones."""
    provides: Sequence[type] = ()
    """The types of the facts that this probe shares with `step.provide`: frozen dataclasses."""
    needs: Mapping[type, Sequence[str]] = {}
    """The types of the facts that it reads with `step.get`, each with the metrics that are unavailable without it."""
    only_measured = False
    """Whether it needs measured steps only: on others it gets no events, and is not collected after the first."""
    on_every_rank = False
    """Whether it measures on all ranks of a distributed run, rather than only on the one that records."""
    from_modules: Sequence[str] = ()
    """The metrics that come from its module taps: unavailable where a module refuses hooks."""

    def step_begins(self) -> None:
        """Called when a measured step begins: after `watch`, or after the `monitor.step` before it."""

    def forward_begins(self) -> None:
        """Called before the model, or a part of it that the loop calls, runs in training mode on a measured step."""

    def inputs_given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Called next, with the arguments of that forward pass."""

    def module_taps(self) -> Sequence[ModuleTap]:
        """The modules to observe during that forward pass."""
        return ()

    def forward_ended(self, output: Any) -> None:
        """Called after the forward pass, even if it or this probe failed; `output` is None if the pass raised."""

    def needs_every_backward(self) -> bool:
        """Whether this probe needs backward events on unmeasured steps."""
        return True

    def backward_begins(self, step: Step) -> None:
        """Called before a backward pass through the model computes its first gradient."""

    def gradient_taps(self) -> Sequence[GradientTap]:
        """The parameters whose gradients to follow in that backward pass, on a measured step."""
        return ()

    def backward_ended(self, step: Step) -> None:
        """Called after the backward pass has accumulated all its gradients."""

    def before_update(self, index: int, optimizer: Optimizer, step: Step, closure: bool) -> None:
        """Called before optimizer number `index` steps; with a closure, gradients do not exist yet."""

    def after_update(self, index: int, optimizer: Optimizer, step: Step, closure: bool) -> None:
        """Called after optimizer number `index` has stepped."""

    def before_other_update(self, optimizer: Optimizer) -> None:
        """Called before an optimizer that is not watched steps, on measured steps only."""

    def collect(self, step: Step) -> Pending | None:
        """The readings of the step that ends now; called once per `monitor.step`."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """The state that must survive a resume."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
