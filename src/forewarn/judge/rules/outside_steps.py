"""Rules about weights that something else than their optimizer moves."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from forewarn.judge.headlines import Message
from forewarn.judge.optimizers import groups_of, settings_of
from forewarn.judge.registry import finding, rule
from forewarn.judge.remedies import advise
from forewarn.judge.series import Floats, Panel, Series, median
from forewarn.judge.tensor_kinds import is_matrix, num_elements
from forewarn.settings import Settings, between
from forewarn.types import Finding, RunInfo, Severity

_SYMPTOMS = (
    "L101", "L102", "L103", "L104", "L105", "L106", "L107", "L108", "G101", "G102", "G103", "G104", "G105", "G106",
    "G107", "G110", "G111", "U101", "U102", "U103", "U104", "U115", "W101", "W102", "W103", "W104", "A101", "A102",
    "A103", "A104", "A106", "A107", "A108", "E102", "E103", "E104", "E106", "E107",
)  # fmt: skip
"""Whatever weights do that are moved too far."""
_ADAM = ("Adam", "AdamW")
_SGD = ("SGD",)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutsideSteps(Settings):
    """When `outside-steps` fires."""

    adam: float = between(10.0, 1.0)
    """Multiple of the learning rate that a step of Adam moves a weight at most, as a root mean square."""
    sgd: float = between(3.0, 1.0)
    """Multiple of what the largest gradient in memory explains that a step of SGD moves a weight at most."""
    part: float = between(0.5, 0.0, 1.0)
    """Fraction of the matrices for which that must hold."""


@rule(
    "U116", "outside-steps",
    reads=("monitor/update_ratio_median", "update/norm", "update/ratio", "gradient/norm", "train/lr"),
    when=("monitor/update_ratio_median",), per_scope=True, hold=3, keep=200,
    explains=_SYMPTOMS,
    settings=OutsideSteps,
    message=Message(
        "Weights move {value:×} as far as their optimizer can move them",
        "limit {bound:×} · tensors affected {num_tensors}",
        "something else moves them too: two optimizers may have the same parameters",
    ),
    remedies=(
        advise("remove_from_optimizer", "Give each parameter to one optimizer, and call its `step()` once",
               "two optimizers that share parameters undo each other's statistics and double the steps"),
        advise("find_writes", "Look for code that writes to the weights around the optimizer step",
               "loading, clamping or averaging weights in the loop overwrites what was learned"),
    ),
)  # fmt: skip
def outside_steps(
    typical: Panel, moved: Panel, ratios: Panel, gradient: Panel, lr: Panel, settings: OutsideSteps, info: RunInfo
) -> Finding | None:
    """A step moves the weights much further than the watched optimizer can.

    ## Why is this bad?
    A step of Adam moves each weight by about its learning rate, whatever the gradient. A step of SGD moves it by the
    learning rate times the gradient, with momentum a few times that. If the weights move ten times as far, something
    else moves them as well: a second optimizer with the same parameters, or code that writes to the weights. The
    learning rate that you set is then not the one that counts.

    It is judged if all optimizers are Adam, AdamW or SGD.

    ## Example
    fires: 1e-3x4 | update/norm{a.w} 5.0x4 | gradient/norm{a.w} 0.1x4 | train/lr{0} 1e-3x4 | group/momentum 0.9
    quiet: 1e-3x4 | update/norm{a.w} 1e-3x4 | gradient/norm{a.w} 0.1x4 | train/lr{0} 1e-3x4 | group/momentum 0.9
    """
    if not moved.at == gradient.at == lr.at == typical.at or math.isnan(typical.series().last):
        return None
    if moved.scopes != gradient.scopes or len(info.groups) != len(lr.scopes):
        return None
    reach = _reach(moved, ratios, gradient, lr, settings, info)
    with np.errstate(invalid="ignore", divide="ignore"):
        excess = moved.last / reach
    judged = is_matrix(moved.scopes, info) & (reach > 0) & (moved.last > 0)
    marked = judged & (excess > 1)
    if not marked.any() or np.count_nonzero(marked) < settings.part * np.count_nonzero(judged):
        return None
    bound = (settings.sgd, settings.adam)[_is(_ADAM, info)]
    return finding(Severity.WARNING, bound * median(excess[marked]), bound, num_tensors=np.count_nonzero(marked).item())


def _is(kinds: tuple[str, ...], info: RunInfo) -> bool:
    return bool(info.optimizers) and all(name.rpartition(".")[2] in kinds for name in info.optimizers)


def _rates(scopes: tuple[str, ...], lr: Panel, info: RunInfo) -> Floats:
    """The present learning rate of each parameter; NaN if it has none."""
    return np.append(lr.last, np.nan)[groups_of(scopes, len(lr.last), info)]


def _sizes(moved: Panel, ratios: Panel) -> Floats:
    """The norm of each tensor, from how far it moved; 0 if it is not known."""
    if ratios.scopes != moved.scopes or ratios.at != moved.at:
        return np.zeros(len(moved.scopes))
    with np.errstate(invalid="ignore", divide="ignore"):
        sizes = moved.last / ratios.last
    return np.where(np.isfinite(sizes), sizes, 0.0).astype(np.float64)


def _reach(moved: Panel, ratios: Panel, gradient: Panel, lr: Panel, settings: OutsideSteps, info: RunInfo) -> Floats:
    """How far a step of its optimizer can move each tensor, with a margin; NaN if that is not known.

    SGD adds the weight decay to the gradient, so that its momentum makes it larger too.
    """
    rates = _rates(moved.scopes, lr, info)
    decay = settings_of(moved.scopes, "weight_decay", info) * _sizes(moved, ratios)
    if _is(_ADAM, info):
        return rates * (settings.adam * np.sqrt(num_elements(moved.scopes, info)) + decay)
    if _is(_SGD, info) or not info.optimizers:
        momentum = settings_of(moved.scopes, "momentum", info)
        largest = np.fmax.reduce(gradient.values, axis=0).astype(np.float64)
        reach: Floats = settings.sgd * rates * (largest + decay) / np.where(momentum < 1, 1 - momentum, 1.0)
        return reach
    return np.full(len(moved.scopes), np.nan)


@rule(
    "U117", "shared-parameters", reads=("update/shared_tensors",), keep=200,
    explains=(*_SYMPTOMS, "L109", "G109", "U112", "U116", "W106", "E101", "E105"),
    message=Message(
        "Two optimizers move the same parameters", "tensors affected {value}",
        "each of them steps with the same gradients, so that the parameters move twice",
    ),
    remedies=(
        advise("remove_from_optimizer", "Give each parameter to one optimizer, and call its `step()` once",
               "two optimizers that share parameters undo each other's statistics and double the steps"),
    ),
)  # fmt: skip
def shared_parameters(shared: Series) -> Finding | None:
    """Two optimizers move the same parameters with the same gradients.

    ## Why is this bad?
    Each step is taken twice, with two learning rates and two momenta. The learning rate that you set is not the one
    that counts, and a scheduler of one optimizer does not reach the other. An optimizer that is not watched counts as
    well. If each optimizer has a backward pass of its own before its step, as in an adversarial autoencoder, parameters
    may be in both, and nothing is reported.

    ## Example
    fires: 0 4
    quiet: 0x9
    """
    if not shared.last > 0:
        return None
    # An optimizer that is not watched is found by its first step, so that its second is the first that counts.
    began = shared.steps[max(0, int(np.argmax(shared.values > 0)) - 1)]
    return finding(Severity.WARNING, shared.last, 0.0, lasting_steps=shared.at - int(began) + 1)


@dataclass(frozen=True, kw_only=True)
class OutsideStepThresholds(Settings):
    """The settings of the rules in this file, by the name of the rule."""

    outside_steps: OutsideSteps = OutsideSteps()
