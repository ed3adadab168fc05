"""Gradients: their global norm on every step, every tensor's statistics on measured ones."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from forewarn.probes.aggregates import gradient_aggregates
from forewarn.probes.parameters import Roster
from forewarn.probes.probe import ONE, Array, Pending, Probe, Reading
from forewarn.probes.stepping import SteppingProbe, present_scale
from forewarn.probes.weights import in_order
from forewarn.stats import COLUMNS, Measurement, Numbers, measure, summarize
from forewarn.stats.portable import dense_values
from forewarn.stats.summary import rescale
from forewarn.types import Reason

_SCALE_TOLERANCE = 1e-5
"""How close to a power of two the ratio of two norms must be to betray a loss scale; float32 sums are off by 1e-6."""


@dataclass(frozen=True, slots=True)
class _Measured:
    """The gradients of one optimizer as it was about to use them."""

    which: list[int]
    found: Measurement
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
        self, roster: Roster, stepping: SteppingProbe, scaler: Any, *, vanishing: float, exploding: float
    ) -> None:
        self._roster = roster
        self._stepping = stepping
        self._scaler = scaler
        self._bounds = (vanishing, exploding)
        self._norm: Tensor | None = None
        self._norm_from_backward = False
        self._clip: float | None = None
        self._clipped_last_step = False
        self._measured: dict[int, _Measured] = {}
        self._untouched = True
        self._residual: Tensor | None = None
        self._looks_scaled = False
        self._was_unavailable = False
        self.norms = np.full(len(roster.names), np.nan)
        """Gradient norm per tensor at the last decoded measured step; NaN where there was none."""

    def clip(self, max_norm: float, error_if_nonfinite: bool) -> Tensor:
        """Clip as torch does, and keep the norm that this computes anyway."""
        norm = torch.nn.utils.clip_grad_norm_(self._roster.parameters, max_norm, error_if_nonfinite=error_if_nonfinite)
        scale = self._scale_for(range(self._roster.num_optimizers))
        self._norm = norm.detach() if scale is None else norm.detach() / scale
        self._norm_from_backward = False
        self._clip = float(max_norm)
        return norm

    def backward_begins(self, measured: bool) -> None:
        if self._untouched and measured:
            self._residual = _global_norm(self._gradients())
            if self._residual is None:
                self._residual = torch.zeros(())
        self._untouched = False

    def backward_ended(self, measured: bool) -> None:
        if self._clipped_last_step:
            return
        norm = _global_norm(self._gradients())
        scale = self._scale_for(range(self._roster.num_optimizers))
        self._norm = norm if norm is None or scale is None else norm / scale
        self._norm_from_backward = True

    def before_update(self, at: int, optimizer: Optimizer, measured: bool, closure: bool) -> None:
        scale = getattr(optimizer, "grad_scale", None)
        if self._scaler is None and isinstance(scale, Tensor) and self._norm_from_backward and self._norm is not None:
            self._norm = self._norm / scale
            self._norm_from_backward = False
        if measured and not closure:
            self._measure(at, scale)

    def after_update(self, at: int, optimizer: Optimizer, measured: bool, closure: bool) -> None:
        self._untouched = True
        if measured and closure:
            self._measure(at, None)

    def collect(self, measured: bool) -> Pending:
        norm, self._norm = self._norm, None
        from_backward, self._norm_from_backward = self._norm_from_backward, False
        clip, self._clip = self._clip, None
        self._clipped_last_step = clip is not None
        found, self._measured = list(self._measured.values()), {}
        residual, self._residual = self._residual, None
        tensors: list[Numbers] = [] if norm is None else [norm.reshape(())]
        tensors += [] if residual is None else [residual.reshape(())]
        for each in found:
            tensors += each.found.rows
            tensors += [] if each.scale is None else [each.scale.detach().clone().reshape(())]

        def decode(arrays: Sequence[Array]) -> Iterator[Reading]:
            left = list(arrays)
            before = math.nan if norm is None else float(left.pop(0))
            if residual is not None:
                yield Reading("gradient/residual_norm", ONE, left.pop(0))
            rows = self._rows(found, left) if found else None
            if self._stepping.skipped:
                yield from self._unavailable(Reason.STEP_SKIPPED, measured)
                return
            at_step = math.nan if rows is None else math.sqrt(np.nansum(rows[:, 2]))
            if rows is not None and from_backward and self._scaler is None:
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
            elif rows is not None:
                yield Reading("gradient/global_norm_clipped", ONE, at_step)
            if rows is not None:
                yield from self._details(rows, found)

        return Pending(tensors, decode)

    def _details(self, rows: Array, found: Sequence[_Measured]) -> Iterator[Reading]:
        quantities = summarize(rows)
        for quantity, values in quantities.items():
            yield Reading(f"gradient/{quantity}", self._roster.names, values)
        missing = np.zeros(len(rows), np.float32)
        for each in found:
            missing[each.which] = each.missing
        yield Reading("gradient/missing", self._roster.names, missing)
        self.norms = quantities["norm"].astype(np.float64)
        for name, value in gradient_aggregates(self.norms, *self._bounds).items():
            yield Reading(f"monitor/{name}", ONE, value)

    def _rows(self, found: Sequence[_Measured], arrays: list[Array]) -> Array:
        """One row per parameter of the model, NaN for those that no optimizer used."""
        rows = np.full((len(self._roster.names), len(COLUMNS)), np.nan)
        for each in found:
            part = in_order(each.found.order, [arrays.pop(0) for _ in each.found.rows])
            rows[each.which] = part if each.scale is None else rescale(part, float(arrays.pop(0)))
        return rows

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
        self._measured[at] = _Measured(which, measure(gradients), missing, scale if isinstance(scale, Tensor) else None)

    def _scale_for(self, optimizers: Sequence[int]) -> Tensor | None:
        """The loss scale that is still in the gradients, if any."""
        scales = [present_scale(self._scaler, self._roster.optimizers[at]) for at in optimizers]
        return next((scale for scale in scales if scale is not None), None)

    def _gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self._roster.parameters if parameter.grad is not None]


def is_loss_scale(ratio: float) -> bool:
    """Whether a ratio of gradient norms before and after is a power of two of 4 or more: clipping does not do that."""
    if not ratio >= 4 or math.isinf(ratio):
        return False
    power = math.log2(ratio)
    return abs(power - round(power)) < _SCALE_TOLERANCE


def _global_norm(gradients: Sequence[Tensor]) -> Tensor | None:
    """The 2-norm of all gradients together, on their device, in float32 or better; None if there are none."""
    values = [each for each in map(dense_values, gradients) if each.numel()]
    if not values:
        return None
    norms = torch._foreach_norm(values, 2, dtype=torch.float64 if values[0].dtype is torch.float64 else torch.float32)
    first = norms[0].device
    total: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(first) for norm in norms]))
    return total
