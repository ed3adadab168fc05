"""Gradients: their global norm on every step, every tensor's statistics on measured ones."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from forewarn.probes.aggregates import gradient_aggregates
from forewarn.probes.parameters import Roster
from forewarn.probes.probe import ONE, Array, Histograms, Pending, Probe, Reading
from forewarn.probes.stepping import SteppingProbe, calling_scaler, present_scale
from forewarn.probes.tensors import Statistics, TensorReader, Visit, power_of_two
from forewarn.stats import Numbers
from forewarn.stats.portable import dense_values
from forewarn.types import Reason

_UPDATES_SEARCHED = 3
"""Optimizer steps at the start of a run at which an undeclared gradient scaler is looked for."""

_SCALE_TOLERANCE = 1e-5
"""How close to a power of two the ratio of two norms must be to betray a loss scale; float32 sums are off by 1e-6."""


@dataclass(frozen=True, slots=True)
class _Measured:
    """The gradients of one optimizer as it was about to use them."""

    which: list[int]
    visit: Visit
    missing: list[bool]
    scale: Tensor | None
    """What they are still to be divided by (fused optimizers unscale as they step)."""


class GradientProbe(Probe):
    """`gradient/global_norm` before clipping on every step; per tensor `gradient/…` as the optimizer uses it.

    The global norm comes from `monitor.clip_grad_norm_` at no cost, else from one read at the end of each backward
    pass. On a step that a scaler skipped there is no gradient worth a reading.
    """

    name = "gradients"

    def __init__(
        self,
        roster: Roster,
        stepping: SteppingProbe,
        scaler: Any,
        reader: TensorReader,
        *,
        vanishing: float,
        exploding: float,
    ) -> None:
        self._roster = roster
        self._stepping = stepping
        self._scaler = scaler
        self._reader = reader
        self._bounds = (vanishing, exploding)
        self._latest: dict[int, Tensor] = {}
        """Norm of each parameter's gradient at the end of the last backward pass."""
        self._used: dict[int, Tensor] = {}
        """Per optimizer: the norm of its gradients at the end of the last backward pass before it stepped."""
        self._clip_norm: Tensor | None = None
        self._clip: float | None = None
        self._clipped_last_step = False
        self._seen_before: list[tuple[int, int]] = []
        self._measured: dict[int, _Measured] = {}
        self._residual: dict[int, Tensor] = {}
        """Per optimizer: the least that was left in its gradients when a backward pass of this step began."""
        self._looks_scaled = False
        self._uneven_scale = False
        self._was_unavailable = False
        self._updates = 0
        self.norms = np.full(len(roster.names), np.nan)
        """Gradient norm per tensor at the last decoded measured step; NaN where there was none."""

    def clip(self, max_norm: float, error_if_nonfinite: bool) -> Tensor:
        """Clip all that the model has now, as torch does, and keep the norm that this computes anyway."""
        norm = torch.nn.utils.clip_grad_norm_(
            self._roster.model.parameters(), max_norm, error_if_nonfinite=error_if_nonfinite
        )
        whole = norm.detach()
        if hasattr(whole, "full_tensor"):  # the norm of shards
            whole = whole.full_tensor()
        scale = self._loss_scale()
        self._clip_norm = whole if scale is None else whole / scale
        self._clip = float(max_norm)
        return norm

    def backward_begins(self, measured: bool) -> None:
        self._seen_before = [] if self._clipped_last_step else self._identities()
        if measured:
            for at in range(self._roster.num_optimizers):
                held = [each for each in self._held(at) if each.requires_grad]  # what is frozen keeps an old gradient
                left = _global_norm([each.grad for each in held if each.grad is not None])
                left = torch.zeros(()) if left is None else left
                known = self._residual.get(at)
                self._residual[at] = left if known is None else torch.minimum(known, left)

    def backward_ended(self, measured: bool) -> None:
        if self._clipped_last_step or self._identities() == self._seen_before:
            return  # either known from clipping, or a pass that filled no gradient, such as torch.autograd.grad
        parameters = self._roster.model.parameters()
        with_gradient = [each for each in parameters if each.grad is not None and each.grad.numel()]
        norms = _norms([each.grad for each in with_gradient if each.grad is not None])
        scale = self._loss_scale()
        norms = norms if scale is None else [norm / scale.to(norm.device) for norm in norms]
        self._latest = {id(each): norm for each, norm in zip(with_gradient, norms, strict=True)}

    def before_update(self, at: int, optimizer: Optimizer, measured: bool, closure: bool) -> None:
        if measured:
            self._roster.refresh()
        if self._scaler is None and self._updates < _UPDATES_SEARCHED:
            self._find_scaler()
        self._updates += 1
        scale = getattr(optimizer, "grad_scale", None)
        if not closure:
            self._commit(at, scale if self._scaler is None else None)
            if measured:
                self._measure(at, scale)

    def after_update(self, at: int, optimizer: Optimizer, measured: bool, closure: bool) -> None:
        if closure:
            self._commit(at, None)
            if measured:
                self._measure(at, None)

    def _find_scaler(self) -> None:
        """Take up a gradient scaler that nobody declared but that is stepping the optimizer at this moment."""
        scaler = calling_scaler()
        if scaler is not None:
            self._scaler = scaler
            self._stepping.watch_scaler(scaler)
            self._latest = {one: norm / scaler._scale.to(norm.device) for one, norm in self._latest.items()}

    def _commit(self, at: int, scale: Any) -> None:
        """Keep the norm of what this optimizer uses: a later backward pass may be another optimizer's."""
        own = [norm for each in self._held(at) if (norm := self._latest.get(id(each))) is not None]
        if own:
            total = _together(own)
            self._used[at] = total / scale if isinstance(scale, Tensor) else total

    def _held(self, at: int) -> list[nn.Parameter]:
        return [each for group in self._roster.optimizers[at].param_groups for each in group["params"]]

    def _identities(self) -> list[tuple[int, int]]:
        """Which gradient tensors there are, and how often each has been written to."""
        gradients = (parameter.grad for parameter in self._roster.model.parameters())
        return [(id(each), each._version) for each in gradients if each is not None]

    def collect(self, measured: bool) -> Pending:
        clip, self._clip = self._clip, None
        self._clipped_last_step = clip is not None
        used = list(self._used.values()) or list(self._latest.values())
        from_backward = clip is None
        norm = self._clip_norm if clip is not None else _together(used) if used else None
        self._used, self._latest, self._clip_norm = {}, {}, None
        found, self._measured = list(self._measured.values()), {}
        left = list(self._residual.values())
        residual, self._residual = (
            (torch.stack([each.to(left[0].device) for each in left]).amax() if left else None),
            {},
        )
        names = self._roster.names
        tensors: list[Numbers] = [] if norm is None else [norm.reshape(())]
        tensors += [] if residual is None else [residual.reshape(())]
        for each in found:
            tensors += each.visit.tensors
            tensors += [] if each.scale is None else [each.scale.detach().clone().reshape(())]

        def decode(arrays: Sequence[Array]) -> Iterator[Reading | Histograms]:
            waiting = list(arrays)
            before = math.nan if norm is None else float(waiting.pop(0))
            if residual is not None:
                yield Reading("gradient/residual_norm", ONE, waiting.pop(0))
            statistics = self._statistics(found, waiting, len(names)) if found else None
            if self._stepping.skipped:
                yield from self._unavailable(Reason.STEP_SKIPPED, measured)
                return
            at_step = math.nan if statistics is None else math.sqrt(np.nansum(statistics.rows[:, 2]))
            if statistics is not None and from_backward and self._scaler is None:
                self._looks_scaled = is_loss_scale(before / at_step if at_step > 0 else math.nan)
            if norm is None:
                yield from self._unavailable(Reason.NO_BACKWARD_SEEN, measured)
            elif from_backward and self._looks_scaled:
                yield from self._unavailable(Reason.SCALED_GRADIENTS, measured)
            else:
                yield Reading("gradient/global_norm", ONE, before)
                yield from self._unavailable(Reason.AVAILABLE, measured)
            if clip is not None:
                yield Reading("train/clip", ONE, clip)
                yield Reading("gradient/global_norm_clipped", ONE, min(before, clip) if before == before else before)
            elif statistics is not None:
                yield Reading("gradient/global_norm_clipped", ONE, at_step)
            if statistics is not None:
                yield from self._details(statistics, found, names)

        return Pending(tensors, decode)

    def _details(
        self, statistics: Statistics, found: Sequence[_Measured], names: tuple[str, ...]
    ) -> Iterator[Reading | Histograms]:
        for each in statistics.readings("gradient", names):
            if each.name == "gradient/norm" and isinstance(each, Reading):
                self.norms = each.values.astype(np.float64)
            yield each
        missing = np.zeros(len(names), np.float32)
        for one in found:
            missing[one.which] = one.missing
        yield Reading("gradient/missing", names, missing)
        for name, value in gradient_aggregates(self.norms, *self._bounds).items():
            yield Reading(f"monitor/{name}", ONE, value)
        if self._uneven_scale:
            yield Reading("monitor/unavailable", ("gradient/histogram",), [float(Reason.UNEVEN_SCALE)])

    def _statistics(self, found: Sequence[_Measured], arrays: list[Array], num_tensors: int) -> Statistics:
        """Those of every parameter of the model; NaN for parameters that no optimizer used."""
        parts = []
        self._uneven_scale = False
        for each in found:
            part = each.visit.decode(arrays)
            if each.scale is not None:
                scale = float(arrays.pop(0))
                part = part.over(scale)
                self._uneven_scale |= part.counts is not None and power_of_two(scale) is None
            parts.append((each.which, part))
        return Statistics.of(parts, num_tensors)

    def _unavailable(self, reason: Reason, measured: bool) -> Iterator[Reading]:
        """Said on measured steps, and taken back once when the reading is there again."""
        if measured and (reason is not Reason.AVAILABLE or self._was_unavailable):
            self._was_unavailable = reason is not Reason.AVAILABLE
            yield Reading("monitor/unavailable", ("gradient/global_norm",), [float(reason)])

    def _measure(self, at: int, scale: Any) -> None:
        which = self._roster.of(at)
        parameters = [self._roster.parameters[one] for one in which]
        gradients = [parameter.grad for parameter in parameters]
        missing = [parameter.requires_grad and parameter.grad is None for parameter in parameters]
        visit = self._reader.read(gradients)
        self._measured[at] = _Measured(which, visit, missing, scale if isinstance(scale, Tensor) else None)

    def _loss_scale(self) -> Tensor | None:
        """The loss scale that is still in the gradients, if any."""
        scales = (present_scale(self._scaler, optimizer) for optimizer in self._roster.optimizers)
        return next((scale for scale in scales if scale is not None), None)


def is_loss_scale(ratio: float) -> bool:
    """Whether a ratio of gradient norms before and after is a power of two of 4 or more: clipping does not do that."""
    if not ratio >= 4 or math.isinf(ratio):
        return False
    power = math.log2(ratio)
    return abs(power - round(power)) < _SCALE_TOLERANCE


def _global_norm(gradients: Sequence[Tensor]) -> Tensor | None:
    """The 2-norm of all gradients together, on the device of the first; None if there are none."""
    norms = _norms([each for each in gradients if each.numel()])
    return _together(norms) if norms else None


def _norms(gradients: Sequence[Tensor]) -> list[Tensor]:
    """The 2-norm of each gradient, in float32 or better."""
    values = [dense_values(each) for each in gradients]
    if not values:
        return []
    double = any(each.dtype is torch.float64 for each in values)
    return list(torch._foreach_norm(values, 2, dtype=torch.float64 if double else torch.float32))


def _together(norms: Sequence[Tensor]) -> Tensor:
    """The norm of several parts from their norms."""
    if len(norms) == 1:
        return norms[0]
    total: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))
    return total
