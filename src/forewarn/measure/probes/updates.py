"""Updates: how far the weights really moved, and why those that did not move stayed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.optim import Optimizer

from forewarn.measure.aggregates import update_aggregates
from forewarn.measure.engine import UpdateSampler, in_order, looked_at
from forewarn.measure.engine.sampling import EPSILON
from forewarn.measure.parameters import ParameterIndex
from forewarn.measure.probe import ONE, Array, Pending, Probe, Reading
from forewarn.measure.probes.gradients import GradientNorms
from forewarn.measure.probes.stepping import Stepping
from forewarn.measure.step import Step
from forewarn.types import FrozenCause


def update_ratios(order: Sequence[int], sums: Sequence[Array], shares: Array) -> tuple[Array, Array]:
    """The ratio ‖Δw‖ / (‖w‖ + ε) and the norm ‖Δw‖ of each tensor, from what `UpdateSampler.moved` measured.

    An empty tensor has neither: NaN.
    """
    step, weight = np.full(len(shares), np.nan), np.full(len(shares), np.nan)
    if len(order):
        step, weight = in_order(order, sums).T.copy()
    step[shares == 0] = np.nan
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.sqrt(step) / (np.sqrt(weight) + EPSILON), np.sqrt(step / shares)


class FrozenTracker:
    """Which tensors have not moved for `patience` checks in a row, and why."""

    def __init__(self, parameter_index: ParameterIndex, threshold: float, patience: int) -> None:
        self._parameter_index = parameter_index
        self._threshold = threshold
        self._patience = patience
        self._names: tuple[str, ...] = ()
        self._checks = np.zeros(0, np.int64)

    @property
    def checks(self) -> dict[str, int]:
        """By name: checks in a row at or below the threshold, where there are any."""
        return {self._names[at]: int(self._checks[at]) for at in np.flatnonzero(self._checks)}

    @checks.setter
    def checks(self, known: Mapping[str, int]) -> None:
        self._names = self._parameter_index.names
        self._checks = np.array([known.get(name, 0) for name in self._names], np.int64)

    def update(
        self,
        ratios: Array,
        gradient_norms: Array,
        *,
        missing: NDArray[np.bool_],
        rates: Array,
        stepped: bool | None,
        skipped: bool = False,
        resting: Sequence[int] = (),
    ) -> NDArray[np.int64]:
        """The `FrozenCause` of each tensor. `stepped=None`: nobody knows whether the optimizer stepped.

        Tensors of the optimizers that are `resting`, which left this step to others, are not judged by it.
        """
        still = np.isfinite(ratios) & (ratios <= self._threshold)
        if stepped is False:
            still[:] = True
        judged = np.ones(len(still), bool)
        for optimizer in resting:
            judged[self._parameter_index.of(optimizer)] = False
        cause = self._causes(still, gradient_norms, missing, rates, stepped, skipped)
        if self._names is not self._parameter_index.names:
            self.checks = self.checks
        checks = self._checks = np.where(judged, np.where(still, self._checks + 1, 0), self._checks)
        at_once = (cause == FrozenCause.NOT_IN_OPTIMIZER) | (cause == FrozenCause.ON_PURPOSE)
        return np.where(at_once | (judged & still & (checks >= self._patience)), cause, FrozenCause.MOVING)

    def _causes(
        self,
        still: NDArray[np.bool_],
        gradient_norms: Array,
        missing: NDArray[np.bool_],
        rates: Array,
        stepped: bool | None,
        skipped: bool,
    ) -> NDArray[np.int64]:
        parameters, trainable = self._parameter_index.parameters, self._parameter_index.trainable
        requires_grad = np.fromiter(map(attrgetter("requires_grad"), parameters), bool, len(parameters))
        if not still.any() and requires_grad.all():
            return np.full(len(still), int(FrozenCause.MOVING))
        orphan = self._parameter_index.groups() < 0
        able = still & ~missing & ~orphan & requires_grad & (rates != 0) & (gradient_norms != 0)
        if stepped is None:
            stepped = not able.any() or bool((~still & ~orphan).any())
        ranked: list[tuple[NDArray[np.bool_], FrozenCause]] = [
            (~trainable & ~requires_grad, FrozenCause.ON_PURPOSE),
            (trainable & ~requires_grad, FrozenCause.REQUIRES_GRAD_OFF),
            (requires_grad & orphan & still, FrozenCause.NOT_IN_OPTIMIZER),
            (still & np.bool_(skipped), FrozenCause.STEP_SKIPPED),
            (still & np.bool_(not stepped), FrozenCause.OPTIMIZER_NOT_STEPPED),
            (still & missing, FrozenCause.NO_GRADIENT),
            (still & (rates == 0), FrozenCause.ZERO_LR),
            (still & (gradient_norms == 0), FrozenCause.ZERO_GRADIENT),
            (still, FrozenCause.ROUNDED_AWAY),
        ]
        return np.select([where for where, _ in ranked], [int(cause) for _, cause in ranked], int(FrozenCause.MOVING))


@dataclass(frozen=True, slots=True)
class WeightsLookedAt:
    """The weights as they are when a measured step ends: where they lie is asked once for all who read them."""

    weights: Sequence[Tensor]


class UpdateProbe(Probe):
    """`update/ratio`, `update/norm` and `update/frozen_cause` per tensor, on measured steps.

    Weights are sampled when the first optimizer is about to step and compared when the step ends, so that several
    optimizers, closures and whatever the loop does to the weights afterwards are all part of what is measured.
    """

    name = "updates"
    provides = (WeightsLookedAt,)
    needs: Mapping[type, Sequence[str]] = {
        Stepping: ("update/ratio", "update/frozen_cause"),
        GradientNorms: ("update/ratio", "update/frozen_cause"),
    }

    def __init__(
        self,
        parameter_index: ParameterIndex,
        *,
        sample_size: int,
        threshold: float,
        patience: int,
    ) -> None:
        self._parameter_index = parameter_index
        self._sample_size = sample_size
        self._version = parameter_index.version
        self._sampler = UpdateSampler(parameter_index.names, sample_size)
        self._tracker = FrozenTracker(parameter_index, threshold, patience)
        self._rates = np.full(len(parameter_index.names), np.nan)

    def before_update(self, index: int, optimizer: Optimizer, step: Step, closure: bool) -> None:
        if not step.measured:
            return
        if self._version != self._parameter_index.version:
            self._version = self._parameter_index.version
            self._sampler = UpdateSampler(self._parameter_index.names, self._sample_size)
        if not self._sampler.remembers:
            self._sampler.remember(self._parameter_index.parameters)
        self._rates = learning_rates(self._parameter_index)

    def collect(self, step: Step) -> Pending | None:
        if not step.measured:
            self._sampler.forget()
            return None
        weights = looked_at(self._parameter_index.parameters)
        step.provide(WeightsLookedAt(weights))
        order, sums = self._sampler.moved(weights)
        self._sampler.forget()
        names, rates, shares = self._parameter_index.names, self._rates, self._sampler.shares

        def decode(arrays: Sequence[Array]) -> Iterator[Reading]:
            stepping, gradients = step.get(Stepping), step.get(GradientNorms)
            if stepping is None or gradients is None:
                return
            ratios, norms = update_ratios(order, arrays, shares)
            cause = self._tracker.update(
                ratios, gradients.norms, missing=gradients.missing, rates=rates,
                stepped=stepping.stepped, skipped=stepping.skipped, resting=stepping.resting,
            )  # fmt: skip
            if stepping.skipped:
                ratios[:], norms[:] = np.nan, np.nan
            on_purpose = cause == FrozenCause.ON_PURPOSE
            yield Reading("update/ratio", names, np.where(on_purpose, np.nan, ratios))
            yield Reading("update/norm", names, np.where(on_purpose, np.nan, norms))
            yield Reading("update/frozen_cause", names, cause)
            frozen = (cause != FrozenCause.MOVING) & ~on_purpose
            moving = np.where(frozen | on_purpose | (ratios == 0), np.nan, ratios)
            for name, value in update_aggregates(moving, frozen).items():
                yield Reading(f"monitor/{name}", ONE, value)

        return Pending(sums, decode)

    def state_dict(self) -> dict[str, Any]:
        trainable = dict(zip(self._parameter_index.names, map(bool, self._parameter_index.trainable), strict=True))
        return {"checks": dict(self._tracker.checks), "trainable": trainable}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._tracker.checks = {name: int(checks) for name, checks in state["checks"].items()}
        known = zip(self._parameter_index.names, self._parameter_index.trainable, strict=True)
        self._parameter_index.trainable = np.array(
            [state["trainable"].get(name, now) for name, now in known], dtype=bool
        )


def learning_rates(parameter_index: ParameterIndex) -> Array:
    """The learning rate of each parameter's group; NaN where it is in none or the rate is a tensor on a device."""
    rates = np.full(len(parameter_index.names), np.nan)
    groups = [group for optimizer in parameter_index.optimizers for group in optimizer.param_groups]
    known = [rate if isinstance(rate := group.get("lr"), int | float) else np.nan for group in groups]
    where = parameter_index.groups()
    rates[where >= 0] = np.array([*known, np.nan], np.float64)[where[where >= 0]]
    return rates
