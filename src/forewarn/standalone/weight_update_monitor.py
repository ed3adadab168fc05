"""A standalone weight-update monitor for any trainer: the update probe's measurements in two calls."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn
from torch.optim import Optimizer

from forewarn.judge.derived import FrozenTracker
from forewarn.measure.aggregates import spread
from forewarn.measure.engine import UpdateSampler, measure, summarize
from forewarn.measure.parameters import ParameterIndex
from forewarn.measure.probes.gradients import GradientNorms
from forewarn.measure.probes.updates import Obstacles, learning_rates, update_ratios
from forewarn.measure.transfer import on_host, rows_on_host
from forewarn.types import FrozenCause, Values


class _Diagnostic:
    """Reads as attributes or by name: `diagnostic.grad_norm`, `diagnostic["grad_norm"]`."""

    __slots__ = ()

    def __getitem__(self, name: str) -> Any:
        try:
            return getattr(self, name)
        except AttributeError:
            raise KeyError(name) from None


@dataclass(frozen=True, slots=True)
class GradientDiagnostic(_Diagnostic):
    """The gradient of one parameter as the optimizer is about to use it."""

    grad_norm: float
    """NaN if there is no gradient."""
    has_grad: bool
    is_vanishing: bool
    is_exploding: bool
    num_nonfinite: int


@dataclass(frozen=True, slots=True)
class UpdateDiagnostic(_Diagnostic):
    """How far one parameter moved between `check_gradients` and `check_updates`."""

    update_ratio: float
    """‖Δw‖ / (‖w‖ + ε) over the sample; NaN if it was not sampled before, or has just moved away from exactly zero."""
    update_norm: float
    is_frozen: bool
    """At or below the threshold in `frozen_patience_steps` consecutive checks, and not on purpose."""
    cause: FrozenCause
    """Why it is frozen; MOVING if it is not, or ON_PURPOSE if it was frozen from the start."""
    grad_norm: float


class WeightUpdateMonitor:
    """Measures gradients and sampled updates of every parameter; the caller decides on which steps.

    Call `check_gradients` after clipping and before `optimizer.step()`, and `check_updates` after it. Holds about
    8 bytes × `sample_size` per parameter, never a copy of the model. Each call reads its results in one transfer.
    """

    def __init__(
        self,
        sample_size: int = 1024,
        vanishing_grad_threshold: float = 1e-7,
        exploding_grad_threshold: float = 1e2,
        frozen_update_ratio_threshold: float = 1e-12,
        frozen_patience_steps: int = 3,
    ) -> None:
        for name, value, least in (
            ("sample_size", sample_size, 1),
            ("vanishing_grad_threshold", vanishing_grad_threshold, 0),
            ("exploding_grad_threshold", exploding_grad_threshold, 0),
            ("frozen_update_ratio_threshold", frozen_update_ratio_threshold, 0),
            ("frozen_patience_steps", frozen_patience_steps, 1),
        ):
            if not value >= least:
                raise ValueError(f"{name} must be at least {least}, not {value!r}")
        self._sample_size = sample_size
        self._vanishing = vanishing_grad_threshold
        self._exploding = exploding_grad_threshold
        self._frozen = frozen_update_ratio_threshold
        self._patience = frozen_patience_steps
        self._model: nn.Module | None = None
        self._parameter_index: ParameterIndex
        self._sampler: UpdateSampler

    def check_gradients(self, model: nn.Module, optimizer: Optimizer) -> dict[str, GradientDiagnostic]:
        """Every trainable parameter's gradient; also samples the weights that `check_updates` compares with."""
        parameter_index = self._attend(model, optimizer)
        gradients = parameter_index.gradients
        quantities = summarize(rows_on_host(measure(gradients)))
        missing = np.array([gradient is None for gradient in gradients], dtype=bool)
        self._gradients = GradientNorms(quantities["norm"].astype(np.float64), missing, np.zeros_like(missing))
        self._sampler.remember(parameter_index.parameters)
        return {
            name: GradientDiagnostic(
                grad_norm=(norm := float(self._gradients.norms[index])),
                has_grad=not missing[index],
                is_vanishing=norm < self._vanishing,
                is_exploding=norm > self._exploding,
                num_nonfinite=0 if missing[index] else int(quantities["nonfinite"][index]),
            )
            for index, name in enumerate(parameter_index.names)
            if parameter_index.parameters[index].requires_grad
        }

    def check_updates(self, model: nn.Module, optimizer: Optimizer) -> dict[str, UpdateDiagnostic]:
        """How far every parameter has moved since `check_gradients`, and which are frozen, with the cause."""
        parameter_index = self._attend(model, optimizer)
        if not self._sampler.remembers:
            raise RuntimeError("check_updates compares with check_gradients; call that before optimizer.step()")
        order, sums = self._sampler.moved(parameter_index.parameters)
        ratios, norms, _ = update_ratios(order, [on_host(part) for part in sums], self._sampler.shares)
        still = np.isfinite(ratios) & (ratios <= self._frozen)
        causes = self._tracker.update(
            parameter_index.names, still, self._stopped_by(parameter_index, still), self._patience
        )
        frozen = (causes != FrozenCause.MOVING.value) & (causes != FrozenCause.ON_PURPOSE.value)
        frozen &= np.array(
            [self._tracker.checks.get(name, 0) >= self._patience for name in parameter_index.names], bool
        )
        return {
            name: UpdateDiagnostic(
                update_ratio=float(ratios[index]),
                update_norm=float(norms[index]),
                is_frozen=bool(frozen[index]),
                cause=FrozenCause(int(causes[index])),
                grad_norm=float(self._gradients.norms[index]),
            )
            for index, name in enumerate(parameter_index.names)
        }

    def _stopped_by(self, parameter_index: ParameterIndex, still: NDArray[np.bool_]) -> Values:
        """What stops each tensor; an optimizer counts as not stepping if none of its tensors moved."""
        obstacles = Obstacles.of(parameter_index, learning_rates(parameter_index))
        free = still & (obstacles.stopped_by(self._gradients) == FrozenCause.MOVING.value)
        moved = ~still & (parameter_index.groups() >= 0)
        stepped = not free.any() or bool(moved.any())
        return obstacles.stopped_by(self._gradients, stepped=stepped).astype(np.float32)

    @property
    def num_bytes(self) -> int:
        """Memory held for the samples."""
        return self._sampler.num_bytes if self._model is not None else 0

    def _attend(self, model: nn.Module, optimizer: Optimizer) -> ParameterIndex:
        """The parameter index of this model; a different model resets the state."""
        if self._model is not model or self._parameter_index.optimizers != (optimizer,):
            self._model = model
            self._parameter_index = ParameterIndex(model, [optimizer])
            self._sampler = UpdateSampler(self._parameter_index.names, self._sample_size)
            self._tracker = FrozenTracker()
            self._gradients = GradientNorms.of_nothing(self._parameter_index.names)
        return self._parameter_index

    @staticmethod
    def aggregate_gradient_stats(diagnostics: Mapping[str, GradientDiagnostic]) -> dict[str, float]:
        """Count, median, p95 (nearest rank), min and max of the gradient norms; vanishing and exploding counts."""
        norms = np.array([diagnostic.grad_norm for diagnostic in diagnostics.values()], np.float64)
        return {
            "count": int(np.isfinite(norms).sum()),
            **spread(norms),
            "vanishing_count": sum(diagnostic.is_vanishing for diagnostic in diagnostics.values()),
            "exploding_count": sum(diagnostic.is_exploding for diagnostic in diagnostics.values()),
        }

    @staticmethod
    def aggregate_update_stats(diagnostics: Mapping[str, UpdateDiagnostic]) -> dict[str, float]:
        """Count, median, p95 (nearest rank), min and max of the update ratios, with the frozen count."""
        trained = [diagnostic for diagnostic in diagnostics.values() if diagnostic.cause is not FrozenCause.ON_PURPOSE]
        ratios = np.array([diagnostic.update_ratio for diagnostic in trained], np.float64)
        return {
            "count": int(np.isfinite(ratios).sum()),
            **spread(ratios),
            "frozen_count": sum(diagnostic.is_frozen for diagnostic in trained),
        }

    @staticmethod
    def top_k_largest_gradients(diagnostics: Mapping[str, GradientDiagnostic], k: int) -> list[tuple[str, float]]:
        """The `k` parameters with the largest gradient norms, largest first."""
        norms = [
            (name, diagnostic.grad_norm)
            for name, diagnostic in diagnostics.items()
            if not math.isnan(diagnostic.grad_norm)
        ]
        return sorted(norms, key=lambda pair: -pair[1])[: max(0, k)]

    @staticmethod
    def top_k_smallest_updates(diagnostics: Mapping[str, UpdateDiagnostic], k: int) -> list[tuple[str, float]]:
        """The `k` parameters with the smallest update ratios, smallest first, without those frozen on purpose."""
        ratios = [
            (name, diagnostic.update_ratio)
            for name, diagnostic in diagnostics.items()
            if not math.isnan(diagnostic.update_ratio) and diagnostic.cause is not FrozenCause.ON_PURPOSE
        ]
        return sorted(ratios, key=lambda pair: pair[1])[: max(0, k)]
