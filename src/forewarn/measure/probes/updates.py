"""Updates: how far the weights really moved, and why some did not move."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.optim import Optimizer

from forewarn.measure.aggregates import spread
from forewarn.measure.engine import Measurement, UpdateSampler, in_order, looked_at
from forewarn.measure.engine.sampling import EPSILON
from forewarn.measure.over_ranks import How, Part
from forewarn.measure.parameters import ParameterIndex
from forewarn.measure.probe import ONE, Array, Pending, Probe, Reading
from forewarn.measure.probes.gradients import GradientNorms
from forewarn.measure.probes.stepping import Stepping
from forewarn.measure.step import Step
from forewarn.types import FrozenCause


def update_ratios(order: Sequence[int], sums: Sequence[Array], shares: Array) -> tuple[Array, Array, Array]:
    """The ratio ‖Δw‖ / (‖w‖ + ε) and the norms ‖Δw‖ and ‖w‖ of each tensor, from what `UpdateSampler.moved` measured.

    An empty tensor has neither: NaN. Nor is there a ratio for a step away from exactly zero; without a step it is 0.
    """
    step, weight = np.full(len(shares), np.nan), np.full(len(shares), np.nan)
    if len(order):
        step, weight = in_order(order, sums).T.copy()
    step[shares == 0] = np.nan
    with np.errstate(invalid="ignore", divide="ignore"):
        ratios = np.sqrt(step) / (np.sqrt(weight) + EPSILON)
        ratios[(weight == 0) & (step > 0)] = np.nan
        return ratios, np.sqrt(step / shares), np.sqrt(weight / shares)


@dataclass(frozen=True, slots=True)
class Obstacles:
    """What is known about each tensor before the values of a step are read: what stops it, and its learning rate."""

    by_tensor: NDArray[np.int64]
    """The `FrozenCause` of each tensor; MOVING where there is none."""
    rates: Array
    """The learning rate of each tensor."""

    @classmethod
    def of(cls, parameter_index: ParameterIndex, rates: Array, reached: Container[int] | None = None) -> Obstacles:
        """`reached` has the ids of the parameters in no optimizer that got a gradient; None if that is unknown.

        The others are trained by no loss on purpose, such as a target network or a moving average of the weights.
        """
        parameters, trainable = parameter_index.parameters, parameter_index.trainable
        requires_grad = np.fromiter(map(attrgetter("requires_grad"), parameters), bool, len(parameters))
        by_tensor = np.where(parameter_index.groups() < 0, FrozenCause.NOT_IN_OPTIMIZER.value, FrozenCause.MOVING.value)
        by_tensor[~requires_grad] = FrozenCause.REQUIRES_GRAD_OFF.value
        by_tensor[~requires_grad & ~trainable] = FrozenCause.ON_PURPOSE.value
        for index in np.flatnonzero(by_tensor == FrozenCause.NOT_IN_OPTIMIZER.value).tolist():
            if reached is not None and id(parameters[index]) not in reached:
                by_tensor[index] = FrozenCause.ON_PURPOSE.value
        return cls(by_tensor, rates)

    def stopped_by(
        self, gradients: GradientNorms, *, stepped: bool | NDArray[np.bool_] = True, skipped: bool = False
    ) -> NDArray[np.int64]:
        """The `FrozenCause` that applies to each tensor, whether or not it moved; MOVING where none does."""
        stopped = np.zeros(len(self.by_tensor), np.int64)
        stopped[gradients.norms == 0] = FrozenCause.ZERO_GRADIENT.value  # what follows outranks it
        stopped[self.rates == 0] = FrozenCause.ZERO_LR.value
        stopped[gradients.missing] = FrozenCause.NO_GRADIENT.value
        stopped[gradients.removed] = FrozenCause.ON_PURPOSE.value
        stopped[~np.broadcast_to(stepped, len(stopped))] = FrozenCause.OPTIMIZER_NOT_STEPPED.value
        if skipped:
            stopped[:] = FrozenCause.STEP_SKIPPED.value
        return np.where(self.by_tensor == FrozenCause.MOVING.value, stopped, self.by_tensor)


@dataclass(frozen=True, slots=True)
class WeightsLookedAt:
    """The weights at the end of a measured step; their addresses are looked up once for all readers."""

    weights: Sequence[Tensor]


_UPDATES = (
    "update/ratio", "update/ratio_estimate", "update/norm", "update/frozen_cause", "monitor/update_ratio_median",
)  # fmt: skip


class UpdateProbe(Probe):
    """`update/ratio`, its estimate, `update/norm` and `update/stopped_by` per tensor, on measured steps.

    Weights are sampled when the first optimizer is about to step, and compared when the step ends. The update therefore
    includes several optimizers, closures and anything the loop does to the weights afterwards.
    """

    name = "updates"
    only_measured = True
    on_every_rank = True
    provides = (WeightsLookedAt,)
    needs: Mapping[type, Sequence[str]] = {
        Stepping: _UPDATES,
        GradientNorms: _UPDATES,
    }

    def __init__(self, parameter_index: ParameterIndex, *, sample_size: int) -> None:
        self._parameter_index = parameter_index
        self._sample_size = sample_size
        self._version = parameter_index.version
        self._sampler = self._new_sampler()
        self._rates = np.full(len(parameter_index.names), np.nan)
        self._reached: set[int] = set()
        """The ids of the parameters in no optimizer that got a gradient."""
        self._missing = np.zeros(0, bool)
        """Per tensor: whether it had no gradient when an optimizer stepped; used if gradients are not measured."""

    def _new_sampler(self) -> UpdateSampler:
        return UpdateSampler(self._parameter_index.names, self._sample_size, self._sampled)

    def _sampled(self, index: int, name: str) -> tuple[NDArray[np.int32], float] | None:
        """The sampled places of the shard that this rank reads; None for a whole parameter."""
        shards = self._parameter_index.shards
        shard = None if shards is None else shards.of[index]
        is_whole = shard is None or (shard.is_read and not shard.is_divided)
        return None if shard is None or is_whole else shard.sampled(name, self._sample_size)

    def before_update(self, index: int, optimizer: Optimizer, step: Step, closure: bool) -> None:
        if not step.measured:
            return
        if self._version != self._parameter_index.version:
            self._version = self._parameter_index.version
            self._sampler = self._new_sampler()
        if not self._sampler.remembers:
            self._sampler.remember(self._parameter_index.weights())
        self._rates = learning_rates(self._parameter_index)
        self._see_gradients()

    def after_update(self, index: int, optimizer: Optimizer, step: Step, closure: bool) -> None:
        if step.measured and closure:
            self._see_gradients()

    def _see_gradients(self) -> None:
        if GradientNorms not in self.needs:
            parameters = self._parameter_index.parameters
            self._missing = np.array([parameter.grad is None for parameter in parameters], bool)
        for index in np.flatnonzero(self._parameter_index.groups() < 0).tolist():
            parameter = self._parameter_index.parameters[index]
            if parameter.grad is not None:
                self._reached.add(id(parameter))

    def collect(self, step: Step) -> Pending | None:
        if not step.measured:
            self._sampler.forget()
            return None
        weights = looked_at(self._parameter_index.weights())
        step.provide(WeightsLookedAt(weights))
        order, sums = self._sampler.moved(weights)
        self._sampler.forget()
        names, shares = self._parameter_index.names, self._sampler.shares
        are_gradients_measured, missing = GradientNorms in self.needs, self._missing
        if len(missing) != len(names) or self._parameter_index.is_sharded:  # no step yet; another rank may hold them
            missing = np.zeros(len(names), bool)
        obstacles = Obstacles.of(self._parameter_index, self._rates, self._reached)

        def decode(arrays: Sequence[Array]) -> Iterator[Reading]:
            stepping, gradients = step.get(Stepping), step.get(GradientNorms)
            if not are_gradients_measured:
                gradients = GradientNorms(np.full(len(names), np.nan), missing, np.zeros(len(names), bool))
            if stepping is None or gradients is None:
                return
            ratios, norms, weight_norms = update_ratios(order, arrays, shares)
            stepped = np.full(len(names), stepping.stepped) & ~self._held_by(stepping.idle)
            stopped_by = obstacles.stopped_by(gradients, stepped=stepped, skipped=stepping.skipped)
            on_purpose = stopped_by == FrozenCause.ON_PURPOSE.value
            nothing_told = on_purpose | stepping.skipped
            ratios[nothing_told], norms[nothing_told] = np.nan, np.nan
            resting = self._held_by(stepping.resting)
            yield Reading("update/ratio", names, ratios)
            yield Reading("update/norm", names, norms)
            unknown = resting & ~on_purpose
            if are_gradients_measured:
                estimates = obstacles.rates * gradients.norms / (weight_norms + EPSILON)
                yield Reading("update/ratio_estimate", names, np.where(np.isnan(ratios), np.nan, estimates))
            else:  # the gradient may be zero
                unknown |= (stopped_by == FrozenCause.MOVING.value) & ~(norms > 0)
            yield Reading("update/stopped_by", names, np.where(unknown, np.nan, stopped_by))
            everywhere = step.with_other_stages("update/ratio", ratios)
            for name, value in spread(everywhere[everywhere != 0], "update_ratio_").items():
                yield Reading(f"monitor/{name}", ONE, value)

        if not self._parameter_index.is_sharded:
            return Pending(sums, decode)
        moved = Measurement(order, tuple(sums)).in_one_piece()
        order = moved.order
        return Pending(moved.rows, decode, [Part(How.SUM, "update/ratio", is_sharded=True) for _ in moved.rows])

    def _held_by(self, optimizers: Sequence[int]) -> NDArray[np.bool_]:
        """Which tensors belong to these optimizers."""
        held = np.zeros(len(self._parameter_index.names), bool)
        for optimizer in optimizers:
            held[self._parameter_index.of(optimizer)] = True
        return held

    def state_dict(self) -> dict[str, Any]:
        trainable = dict(zip(self._parameter_index.names, map(bool, self._parameter_index.trainable), strict=True))
        return {"trainable": trainable}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        present = zip(self._parameter_index.names, self._parameter_index.trainable, strict=True)
        self._parameter_index.trainable = np.array(
            [state["trainable"].get(name, now) for name, now in present], dtype=bool
        )


def learning_rates(parameter_index: ParameterIndex) -> Array:
    """The learning rate of each parameter's group; NaN if it is in no group or the rate is a tensor on a device."""
    rates = np.full(len(parameter_index.names), np.nan)
    groups = [group for optimizer in parameter_index.optimizers for group in optimizer.param_groups]
    group_rates = [rate if isinstance(rate := group.get("lr"), int | float) else np.nan for group in groups]
    group_of = parameter_index.groups()
    rates[group_of >= 0] = np.array([*group_rates, np.nan], np.float64)[group_of[group_of >= 0]]
    return rates
