"""Rules about the epsilon of Adam and its kin, which keeps them from dividing by zero."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from forewarn.judge.headlines import Message
from forewarn.judge.objective import is_objective
from forewarn.judge.optimizers import settings_of
from forewarn.judge.registry import NEVER, Gate, Since, finding, rule
from forewarn.judge.remedies import advise, for_cause, keep_in_float32
from forewarn.judge.rules.loss import is_solved
from forewarn.judge.series import Panel, median
from forewarn.judge.tensor_kinds import in_float16, is_matrix, num_elements
from forewarn.settings import Settings, between
from forewarn.types import Finding, RunInfo, Severity

_SMALLEST_HALF = 2.0**-24
"""Smallest positive float16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpsilonDominates(Settings):
    """When `epsilon-dominates` fires."""

    share: float = between(0.1, 0.0)
    """Root mean square of a gradient, as a fraction of epsilon, below which epsilon decides the size of the step."""
    least: float = between(1e-6, 0.0)
    """Epsilon below which the gradients are to blame, not epsilon: `vanishing-gradient` is about them."""
    learned: float = between(0.5, 0.0, 1.0)
    """Fraction of the first loss below which it does not fire: gradients are small in a minimum."""
    unusual: float = between(0.1, 0.0)
    """Epsilon from which it is a warning even if the loss is not the objective, as in reinforcement learning."""


@rule(
    "U112", "epsilon-dominates",
    reads=("monitor/update_ratio_median", "gradient/norm", "train/loss", "train/loss_level", "update/separate_losses"),
    when=("monitor/update_ratio_median",), per_scope=True, hold=3, keep=100,
    explains=("L104", "L105", "U101", "U103", "E102", "E103", "E105", "E106"),
    settings=EpsilonDominates,
    message=Message(
        "The epsilon of the optimizer outweighs the gradients",
        "gradient {value} (root mean square) · epsilon {epsilon} · expected gradients above {bound}",
    ),
    remedies=(
        advise("lower_epsilon", "Lower the epsilon of the optimizer to {to}",
               "the step is lr × m / (√v + epsilon): a large epsilon makes all steps small", to=1e-8),
    ),
)  # fmt: skip
def epsilon_dominates(
    typical: Panel, gradient: Panel, loss: Panel, levels: Panel, separate: Panel, settings: EpsilonDominates,
    info: RunInfo,
) -> Finding | None:  # fmt: skip
    """The epsilon of the optimizer decides how far its steps go.

    ## Why is this bad?
    Adam divides each gradient by √v + epsilon, so that every weight moves by about the learning rate. If epsilon is
    larger than the gradients, the steps shrink with them, and the run crawls as if the learning rate were far too low.
    The default of 1e-8 never does that. In reinforcement learning, where large epsilons are common, it is information.

    ## Example
    fires: 1e-6x3 | gradient/norm{layer.weight} 0.01x3 | group/eps 1.0
    quiet: 1e-6x3 | gradient/norm{layer.weight} 0.01x3 | group/eps 1e-8
    """
    if gradient.at != typical.at or math.isnan(typical.series().last):
        return None
    epsilons = settings_of(gradient.scopes, "eps", info)
    judged = is_matrix(gradient.scopes, info) & (epsilons >= settings.least) & (gradient.last > 0)
    if not judged.any() or is_solved(loss, levels, settings.learned):
        return None
    sizes = gradient.last / np.sqrt(num_elements(gradient.scopes, info))
    ratio = median(sizes[judged] / epsilons[judged])
    if not ratio < settings.share:
        return None
    epsilon = float(epsilons[judged].max())
    matters = epsilon >= settings.unusual or is_objective(loss.series(), separate.series(), info)
    severity = Severity.WARNING if matters else Severity.INFO
    return finding(severity, median(sizes[judged]), settings.share * epsilon, epsilon=epsilon)


def _without_epsilon(info: RunInfo) -> bool:
    """Whether a group has an epsilon of exactly zero."""
    return any(group.get("eps") == 0 for group in info.groups)


def _may_divide_by_zero(settings: None, info: RunInfo) -> Gate:
    is_likely = _without_epsilon(info) or any(parameter.dtype == "float16" for parameter in info.parameters.values())
    return Since(0) if is_likely else NEVER


@rule(
    "U113", "epsilon-underflow", reads=("gradient/global_norm", "gradient/norm"),
    when=("gradient/global_norm",), per_scope=True, keep=100,
    gate=_may_divide_by_zero,
    explains=("L101", "L102", "L103", "L107", "L108", "E107", "G101", "U102", "W101", "W102", "A103"),
    message=(
        Message(
            "The epsilon of the optimizer is zero in float16",
            "epsilon {value} · expected at least {bound} · tensors affected {num_tensors}",
        ),
        Message("The epsilon of the optimizer is zero", "epsilon {value} · expected at least {bound}"),
    ),
    remedies=(
        for_cause("rounded", keep_in_float32()),
        for_cause("rounded", advise(
            "raise_epsilon", "Raise the epsilon of the optimizer to {to}",
            "the smallest positive float16 is 6e-8: a smaller epsilon is rounded to zero", to=1e-4,
        )),
        for_cause("zero", advise(
            "raise_epsilon", "Raise the epsilon of the optimizer to {to}",
            "it keeps the optimizer from dividing by zero", to=1e-8,
        )),
    ),
)  # fmt: skip
def epsilon_underflow(norm: Panel, gradient: Panel, info: RunInfo) -> Finding | None:
    """The optimizer's epsilon is zero, or rounded to zero because the weights are in float16.

    ## Why is this bad?
    Adam divides by √v + epsilon. In float16 the square of a small gradient is zero, and so is an epsilon of 1e-8. The
    division then gives infinity or NaN, and the first such step destroys the weight. Keep the weights in float32 and
    use autocast, or raise epsilon. With an epsilon of 0, one gradient of exactly zero is enough.

    ## Example
    fires: 0.1 | gradient/norm{half.weight} 0.1 | group/eps 1e-8
    fires: 0.1 | gradient/norm{layer.weight} 0.1 | group/eps 0.0
    quiet: 0.1 | gradient/norm{layer.weight} 0.1 | group/eps 1e-8
    """
    if _without_epsilon(info) and not math.isnan(norm.series().last):
        return finding(Severity.WARNING, 0.0, _SMALLEST_HALF, cause="zero")
    if gradient.at != norm.at or math.isnan(norm.series().last):
        return None
    epsilons = settings_of(gradient.scopes, "eps", info)
    lost = in_float16(gradient.scopes, info) & (epsilons > 0) & (epsilons < _SMALLEST_HALF)
    if not lost.any():
        return None
    return finding(
        Severity.WARNING, epsilons[lost].min(), _SMALLEST_HALF, num_tensors=np.count_nonzero(lost).item(),
        cause="rounded",
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class EpsilonThresholds(Settings):
    """The settings of the rules in this file, by the name of the rule."""

    epsilon_dominates: EpsilonDominates = EpsilonDominates()
