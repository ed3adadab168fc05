"""Gradients: their global norm on every step, every tensor's statistics on measured ones."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, compress
from operator import attrgetter
from statistics import median
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer

from forewarn.measure.accumulation import Accumulation
from forewarn.measure.aggregates import spread
from forewarn.measure.engine import Value, norms
from forewarn.measure.engine.norms import Norm, NormReader, norm_of_all
from forewarn.measure.foreign_clipping import ForeignClipping
from forewarn.measure.gradient_writes import EarlierGradients, GradientWriteDetector
from forewarn.measure.over_ranks import OWN, How, Part
from forewarn.measure.parameters import ParameterIndex
from forewarn.measure.pipelining import divisor_of_gradients
from forewarn.measure.probe import ONE, Array, GradientTap, Histograms, Pending, Probe, Reading
from forewarn.measure.probes.stepping import FoundScaler, Stepping, present_scale
from forewarn.measure.rank_gradient import RankGradient
from forewarn.measure.shards import local_part, own_share_of_norm
from forewarn.measure.step import Step
from forewarn.measure.tensor_reader import Statistics, TensorReader, Visit, power_of_two
from forewarn.types import Reason

_STARTING_STEPS = 10
"""Number of steps in the median that gives the gradient norm at the start of the run."""

_gradient_of, _requires_grad = attrgetter("grad"), attrgetter("requires_grad")

_SCALE_TOLERANCE = 1e-5
"""How close to a power of two a ratio of norms must be to count as a loss scale; float32 sums are off by 1e-6."""


@dataclass(frozen=True, slots=True)
class _Measured:
    """The gradients of one optimizer just before it used them."""

    which: NDArray[np.intp]
    visit: Visit
    missing: NDArray[np.bool_]
    scale: Tensor | None
    """The loss scale that is still in them (fused optimizers unscale as they step)."""


@dataclass(frozen=True, slots=True)
class GradientNorms:
    """The gradients of a measured step, per tensor; known once its readings are decoded."""

    norms: Array
    """NaN where there was no gradient, and everywhere if no optimizer used any."""
    missing: NDArray[np.bool_]
    """Whether a tensor had no gradient when an optimizer stepped."""
    removed: NDArray[np.bool_]
    """Whether the loop had removed it after the backward pass, but left others: a way to freeze a layer for a while."""

    @classmethod
    def of_nothing(cls, names: Sequence[str]) -> GradientNorms:
        """The norms of a step on which no optimizer used a gradient."""
        return cls(np.full(len(names), np.nan), *np.zeros((2, len(names)), bool))


class GradientProbe(Probe):
    """`gradient/global_norm` before clipping on every step; per tensor `gradient/…` as the optimizer uses it.

    The global norm comes from `monitor.clip_grad_norm_` at no cost, else from one read at the end of each backward
    pass. A step that a scaler skipped has no gradient readings.
    """

    name = "gradients"
    on_every_rank = True
    provides = (GradientNorms,)
    needs: Mapping[type, Sequence[str]] = {
        Stepping: (
            "gradient/global_norm", "gradient/global_norm_clipped", "gradient/norm", "gradient/mean", "gradient/std",
            "gradient/nonfinite", "gradient/missing", "gradient/backward_passes", "train/clip",
        ),
        FoundScaler: (),
    }  # fmt: skip

    def __init__(self, parameter_index: ParameterIndex, scaler: Any, reader: TensorReader) -> None:
        self._parameter_index = parameter_index
        self._scaler = scaler
        self._reader = reader
        self._norms = NormReader()
        self._latest: dict[int, Norm] = {}
        """Norm of each parameter's gradient at the end of the last backward pass."""
        self._latest_scale: Tensor | None = None
        """The loss scale that is still in these norms."""
        self._used: dict[int, Norm] = {}
        """Per optimizer: the norm of its gradients at the end of the last backward pass before it stepped."""
        self._has_summands = False
        """Whether some gradients of this step are sums over ranks of which this one has a summand."""
        self._clip_norm: Norm | None = None
        self._clip: float | None = None
        self._declared_limit: float | None = None
        """The limit of clipping on this step if only that is known."""
        self._clipped_last_step = False
        self._foreign_clipping = ForeignClipping()
        self._gradient_writes = GradientWriteDetector(parameter_index)
        self._measured: dict[int, _Measured] = {}
        self._residual: dict[int, list[Norm]] = {}
        """Per optimizer: the norms in its gradients when the backward passes of this step began."""
        self._earlier = EarlierGradients()
        self._left_over: dict[int, list[Norm]] = {}
        """Per optimizer: the part of these norms that comes from earlier steps."""
        self._stepped: set[int] = set()
        """Indices of the optimizers that have stepped on this step."""
        self._accumulation = Accumulation(parameter_index.num_optimizers)
        self._rank = RankGradient(parameter_index.called)
        self._divisor: int | None = None
        """What a pipeline divides the gradients by after the backward passes; None until the first of them."""
        self._looks_scaled = False
        self._start: list[float] = []
        """The first finite global norms."""
        self._missing = np.zeros(0, bool)
        """Per tensor: whether it had no gradient when an optimizer was last measured."""
        self._removed = np.zeros(0, bool)
        """Per tensor: whether the backward pass before that had left one, and others are still there."""

    def clipped(self, norm: Any, max_norm: float) -> None:
        """Keep the norm that clipping computed; if that is None, it is measured as without clipping."""
        if norm is None:
            self._declared_limit = float(max_norm)
            return
        index = self._parameter_index
        whole = norm if index.rank is None else own_share_of_norm(norm, index.rank, index.first_rank)
        if hasattr(whole, "full_tensor"):
            whole = whole.full_tensor()  # one process, which holds all shards
        if self._clip is not None:
            self._accumulation.drop()  # clipping between two passes hides how the norm grows
        self._clip_norm = _unscaled(whole, self._loss_scale())
        self._clip = float(max_norm)

    def step_begins(self) -> None:
        self._earlier.step_begins(self._parameter_index.parameters)

    def forward_begins(self) -> None:
        self._rank.forward_begins()

    def needs_every_backward(self) -> bool:
        return not self._clipped_last_step  # otherwise clipping gives the norm

    def backward_begins(self, step: Step) -> None:
        self._gradient_writes.begins()
        if not step.measured:
            return
        parameters = self._parameter_index.parameters
        none_filled = not any(gradient is not None for gradient in map(_gradient_of, parameters))
        for index in range(self._parameter_index.num_optimizers):
            of_passes = self._left_over.setdefault(index, [])
            filled = {
                parameter: gradient
                for parameter in (() if none_filled else map(parameters.__getitem__, self._parameter_index.of(index)))
                if (gradient := self._gradient(parameter)) is not None
                and parameter.requires_grad  # a frozen parameter keeps its old gradient
            }
            present = norms(list(filled.values())) if filled else []
            is_earlier = [self._earlier.has(parameter, is_first_pass=not of_passes) for parameter in filled]
            left_over = list(compress(present, is_earlier))
            of_passes.append(norm_of_all(left_over) if left_over else 0.0)
            self._residual.setdefault(index, []).append(norm_of_all(present) if present else 0.0)

    def gradient_taps(self) -> Sequence[GradientTap]:
        if not self._parameter_index.leads:
            return ()
        is_first = not self._accumulation.is_under_way
        return self._rank.follow(self._parameter_index.live) if is_first and not self._accumulation.expected else ()

    def backward_ended(self, step: Step) -> None:
        if not self._gradient_writes.has_come():
            return  # a pass that filled no gradient, such as torch.autograd.grad
        is_first = step.measured and self._accumulation.filled(len(self._residual[0]) - 1, self._rank.is_averaged)
        if self._clipped_last_step and not (is_first and (self._accumulation.expected or self._rank.num_ranks > 1)):
            return
        index = self._parameter_index  # the model was walked when its forward pass began
        live = index.live(walks=not step.forwards) if step.measured else index.recent()
        read = _gradient_of if self._parameter_index.rank is None else self._gradient
        gradients: dict[int, Tensor] = {
            key: gradient
            for key, gradient in zip(live, map(read, live.values()), strict=True)
            if gradient is not None and gradient.numel()
        }
        scale = self._scale_after_backward()
        norm_of: dict[int, Norm] = {}
        if not self._clipped_last_step or (is_first and self._accumulation.expected):
            norm_of = dict(zip(gradients, self._norms(list(gradients.values())), strict=True))
        if is_first and self._comparable(live, gradients):
            everything = list(norm_of.values())
            if self._rank.is_alone:
                self._accumulation.keep((), everything, scale)
            else:
                self._accumulation.keep(everything, self._rank.norms(gradients), scale)
        if not self._clipped_last_step:
            self._latest, self._latest_scale = norm_of, scale

    def _gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """The gradient of a parameter, or the part that this rank reads; None if there is none, or it is empty."""
        gradient = parameter.grad
        if gradient is not None and (shards := self._parameter_index.shards) is not None:
            reads = shards.reads_gradient(parameter)
            gradient = local_part(gradient) if reads else None
            self._has_summands |= reads and gradient is None
        return None if gradient is None or not gradient.numel() else gradient

    def _comparable(self, live: Mapping[int, nn.Parameter], filled: Mapping[int, Tensor]) -> bool:
        """Whether the gradients of the filled parameters are complete and come from this step alone.

        A parameter that is frozen or in no optimizer may hold an old gradient; a sharded one holds only a part.
        """
        index = self._parameter_index
        in_an_optimizer = set(chain.from_iterable(map(index.keys_of, range(index.num_optimizers))))
        parameters = list(map(live.__getitem__, filled))
        return (
            in_an_optimizer.issuperset(filled)
            and all(map(_requires_grad, parameters))
            and not any(hasattr(kind, "to_local") for kind in set(map(type, parameters)))
        )

    def before_update(self, index: int, optimizer: Optimizer, step: Step, closure: bool) -> None:
        found_scaler = step.get(FoundScaler)
        if found_scaler is not None and self._scaler is None:
            self._scaler = found_scaler.scaler
            self._accumulation.drop()  # its norms were kept as if the gradients were unscaled
            self._latest_scale = found_scaler.scaler._scale.detach().clone()
        scale = getattr(optimizer, "grad_scale", None)
        if not closure:
            self._commit(index, scale if self._scaler is None else None, step)
            if step.measured:
                self._measure(index, scale)

    def after_update(self, index: int, optimizer: Optimizer, step: Step, closure: bool) -> None:
        if closure:
            self._commit(index, None, step)
            if step.measured:
                self._measure(index, None)

    def _commit(self, index: int, scale: Any, step: Step) -> None:
        """Keep the norm of the gradients that this optimizer uses: a later backward pass may be for another."""
        self._accumulation.used(index)
        self._stepped.add(index)
        if index in step.unseen:  # it has to be read now, after any clipping
            parameters = self._parameter_index.parameters
            held = [parameters[place] for place in self._parameter_index.of(index)]
            own = norms([gradient for parameter in held if (gradient := self._gradient(parameter)) is not None])
            loss_scale = None
        else:
            loss_scale = self._latest_scale
            latest = map(self._latest.get, self._parameter_index.keys_of(index))
            own = [norm for norm in latest if norm is not None] if self._latest else []
        if own or not self._parameter_index.leads:  # a rank may have nothing to add
            total = _unscaled(norm_of_all(own), loss_scale)
            self._used[index] = _unscaled(total, scale if isinstance(scale, Tensor) else None)

    def collect(self, step: Step) -> Pending:
        clip, self._clip = self._clip, None
        declared_limit, self._declared_limit = self._declared_limit, None
        self._clipped_last_step = clip is not None
        from_backward = clip is None
        norm = self._clip_norm if clip is not None else self._norm_from_backward()
        is_unseen = from_backward and bool(step.unseen)
        is_partial, self._has_summands = from_backward and self._has_summands, False
        norm = None if is_partial else norm
        index = self._parameter_index
        used = self._used if len(index.optimizers) > 1 else {}
        self._used, self._latest, self._latest_scale, self._clip_norm = {}, {}, None, None
        measured, self._measured = list(self._measured.values()), {}
        missing, removed = self._missing, self._removed
        residual, self._residual = list(self._residual.values()), {}
        left_over, self._left_over = self._left_over, {}
        if left_over:
            left_over = {place: of_passes for place, of_passes in left_over.items() if place in self._stepped}
        self._stepped = set()
        passes = self._accumulation.collect()
        num_ranks = self._rank.num_ranks if passes.places else 1
        names, is_sharded = index.names, index.rank is not None and index.is_sharded
        names_of = index.optimizer_names() if used else ()
        tensors: list[Value] = [] if norm is None else [norm]
        parts = [] if norm is None else [_part("gradient/global_norm", is_sharded)]
        tensors += used.values()
        if used:
            parts += [_part(f"gradient/optimizer_norm {place}", is_sharded) for place in used]
        for number, pass_norms in enumerate([*residual, *left_over.values()]):
            tensors += pass_norms
            parts += [_part(f"left {number} {nth}", is_sharded) for nth, _ in enumerate(pass_norms)]
        if passes.first is not None:
            tensors.append(_unscaled(passes.first, passes.scale))
            parts.append(OWN)
        for gradients in measured:
            tensors += gradients.visit.tensors
            parts += gradients.visit.parts("gradient")
            tensors += [] if gradients.scale is None else [gradients.scale.detach().clone().reshape(())]
            parts += [] if gradients.scale is None else [OWN]

        def decode(arrays: Sequence[Array]) -> Iterator[Reading | Histograms]:
            waiting = list(arrays)
            before = math.nan if norm is None else float(waiting.pop(0))
            by_optimizer = [float(waiting.pop(0)) for _ in used] if used else []
            by_pass: list[list[float]] = []
            if residual:  # on a measured step
                by_pass = [[float(waiting.pop(0)) for _ in pass_norms] for pass_norms in residual]
                still_left = [
                    min(
                        step.whole_norm(f"left over {index} {place}", float(waiting.pop(0)))
                        for place in range(len(of_passes))
                    )
                    for index, of_passes in left_over.items()
                ]
                if still_left:
                    yield Reading("gradient/residual_norm", ONE, max(still_left))
            first = math.nan if passes.first is None else float(waiting.pop(0))
            statistics, is_uneven = self._statistics(measured, waiting, len(names)) if measured else (None, False)
            stepping = step.get(Stepping)
            if stepping is None:
                return
            if stepping.skipped:
                if step.measured:
                    step.unavailable("gradient/global_norm", Reason.STEP_SKIPPED)
                    step.provide(GradientNorms.of_nothing(names))
                return
            at_step = math.nan if statistics is None else math.sqrt(np.nansum(statistics.rows[:, 2]))
            if statistics is not None and from_backward and self._scaler is None and declared_limit is None:
                self._looks_scaled = is_loss_scale(before / at_step if at_step > 0 else math.nan)
            reason = Reason.AVAILABLE
            if norm is None:
                reason = Reason.SUM_OVER_RANKS if is_partial else Reason.NO_BACKWARD_SEEN
            elif from_backward and self._looks_scaled:
                reason = Reason.SCALED_GRADIENTS
            else:
                whole = step.whole_norm("gradient/global_norm", before)
                yield Reading("gradient/global_norm", ONE, whole)
                if used:
                    yield Reading("gradient/optimizer_norm", tuple(names_of[place] for place in used), by_optimizer)
                if is_unseen:
                    reason = Reason.AFTER_CLIPPING
                else:
                    if step.measured or len(self._start) < _STARTING_STEPS:
                        yield from self._share_of_start(whole, step.measured)
                    if passes.places:
                        left = np.array(by_pass).max(axis=0)
                        first = step.whole_norm("first pass", first)
                        yield from self._accumulation.readings(step, passes, left, first, whole, num_ranks)
            if step.measured:
                step.unavailable("gradient/global_norm", reason)
            if from_backward and statistics is not None and reason is Reason.AVAILABLE:
                self._foreign_clipping.see(before, at_step)
            limit = declared_limit or self._foreign_clipping.limit if from_backward else clip
            if limit is not None:
                yield Reading("train/clip", ONE, limit)
            clipped: float | None = None
            if limit is not None and norm is not None and (clip is not None or statistics is None):
                clipped = min(before, limit) if before == before else before
            elif is_partial:
                clipped = None
            elif statistics is not None:
                clipped = at_step
            elif reason is Reason.AFTER_CLIPPING:
                clipped = before
            if clipped is not None:
                whole = step.whole_norm("gradient/global_norm_clipped", clipped)
                yield Reading("gradient/global_norm_clipped", ONE, whole)
            if statistics is not None:
                absent = np.isnan(statistics.rows[:, 0]) if is_sharded else np.ones(len(names), bool)
                norms = yield from self._details(step, statistics, measured, names, absent)
                step.unavailable("gradient/histogram", Reason.UNEVEN_SCALE if is_uneven else Reason.AVAILABLE)
                step.provide(GradientNorms(norms, missing & absent, removed & absent))
            elif step.measured:
                step.provide(GradientNorms.of_nothing(names))

        return Pending(tensors, decode, parts)

    def _norm_from_backward(self) -> Norm | None:
        if self._used:
            used = list(self._used.values())
            return used[0] if len(used) == 1 else norm_of_all(used)
        return _unscaled(norm_of_all(list(self._latest.values())), self._latest_scale) if self._latest else None

    def _details(
        self,
        step: Step,
        statistics: Statistics,
        measured: Sequence[_Measured],
        names: tuple[str, ...],
        absent: NDArray[np.bool_],
    ) -> Generator[Reading | Histograms, None, Array]:
        """Yield the readings of each tensor; return the gradient norms. Another rank may hold what is missing here."""
        norms = np.full(len(names), np.nan)
        for reading in statistics.readings("gradient", names):
            if reading.name == "gradient/norm" and isinstance(reading, Reading):
                norms = reading.values.astype(np.float64)
            yield reading
        missing = np.zeros(len(names), np.float32)
        for gradients in measured:
            missing[gradients.which] = gradients.missing
        yield Reading("gradient/missing", names, missing * absent)
        for name, value in spread(step.with_other_stages("gradient/norm", norms), "grad_").items():
            yield Reading(f"monitor/{name}", ONE, value)
        return norms

    def _statistics(
        self, measured: Sequence[_Measured], arrays: list[Array], num_tensors: int
    ) -> tuple[Statistics, bool]:
        """The statistics of every parameter of the model, and whether histograms are left out.

        They are NaN where no optimizer used a gradient. A loss scale that is not a power of two rules out histograms.
        """
        parts = []
        is_uneven = False
        for gradients in measured:
            part = gradients.visit.decode(arrays)
            if gradients.scale is not None:
                scale = float(arrays.pop(0))
                part = part.over(scale)
                is_uneven |= part.counts is not None and power_of_two(scale) is None
            parts.append((gradients.which, part))
        return Statistics.of(parts, num_tensors), is_uneven

    def _share_of_start(self, norm: float, measured: bool) -> Iterator[Reading]:
        if len(self._start) < _STARTING_STEPS:
            self._start += [norm] if math.isfinite(norm) else []
        elif measured and (level := median(self._start)) > 0:
            yield Reading("gradient/share_of_start", ONE, norm / level)

    def state_dict(self) -> dict[str, Any]:
        return {"start": list(self._start), "accumulation": self._accumulation.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._start = [float(norm) for norm in state["start"]]
        if "accumulation" in state:
            self._accumulation.load_state_dict(state["accumulation"])

    def _measure(self, index: int, scale: Any) -> None:
        which, parameters = self._parameter_index.of(index), self._parameter_index.parameters
        gradients: Sequence[Tensor | None] = list(map(_gradient_of, parameters))
        self._missing = np.array([gradient is None for gradient in gradients], bool)
        self._removed = self._missing & (not self._missing[which].all())
        for position in np.flatnonzero(self._removed):
            self._removed[position] = id(parameters[int(position)]) in self._latest
        self._missing &= ~self._removed
        missing = self._missing[which]
        for position in np.flatnonzero(missing):
            missing[position] = parameters[which[position]].requires_grad
        shards = self._parameter_index.shards
        gradients = gradients if shards is None else shards.gradients(parameters)
        own = (
            gradients
            if np.array_equal(which, np.arange(len(gradients)))
            else [gradients[position] for position in which]
        )
        visit = self._reader.read(own, self._parameter_index.is_sharded)
        self._measured[index] = _Measured(which, visit, missing, scale if isinstance(scale, Tensor) else None)

    def _scale_after_backward(self) -> Tensor | None:
        """The loss scale, times what a pipeline divides the gradients by before the optimizer uses them."""
        if self._divisor is None:
            self._divisor = divisor_of_gradients(self._parameter_index.called)
        scale = self._loss_scale()
        if scale is not None:
            return scale.detach().clone() if self._divisor == 1 else scale.detach() * self._divisor
        return torch.tensor(float(self._divisor)) if self._divisor > 1 else None

    def _loss_scale(self) -> Tensor | None:
        """The loss scale that is still in the gradients, if any."""
        if self._scaler is None:
            return None
        scales = (present_scale(self._scaler, optimizer) for optimizer in self._parameter_index.optimizers)
        return next((scale for scale in scales if scale is not None), None)


def is_loss_scale(ratio: float) -> bool:
    """Whether a ratio of gradient norms is a power of two of at least 4, which clipping does not produce."""
    if not ratio >= 4 or math.isinf(ratio):
        return False
    power = math.log2(ratio)
    return abs(power - round(power)) < _SCALE_TOLERANCE


def _unscaled(norm: Norm, scale: Tensor | None) -> Norm:
    """The norm divided by the loss scale that is in it."""
    if scale is None:
        return norm
    return norm / (scale.to(norm.device) if isinstance(norm, Tensor) else scale)


@lru_cache(maxsize=256)
def _part(label: str, is_sharded: bool) -> Part:
    """How a norm is combined over ranks."""
    return Part(How.L2 if is_sharded else How.OWN, label, is_sharded)
