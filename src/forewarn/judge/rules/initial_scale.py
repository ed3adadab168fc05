"""Rules about the scale on which the weights start."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from forewarn.judge.headlines import Message
from forewarn.judge.registry import finding, rule
from forewarn.judge.remedies import advise, for_cause
from forewarn.judge.series import Bools, Floats, Panel, Series, median
from forewarn.judge.tensor_kinds import gain_factors
from forewarn.settings import Settings, between
from forewarn.types import Finding, RunInfo, Severity


@dataclass(frozen=True, slots=True, kw_only=True)
class InitialScale(Settings):
    """When `initial-scale` fires."""

    large: float = between(2.5, 0.0)
    """Median gain of the initial weights from which they are too large. Usual initializations have 0.5 to 1.5."""
    output: float = between(2.0, 0.0)
    """Median standard deviation of the layers' outputs that they must have as well: scaled weights are harmless."""
    small: float = between(0.06, 0.0)
    """Median gain below which they are too small."""
    rewritten: float = between(0.1, 0.0)
    """Median update ratio of the first step from which small weights are rewritten rather than trained."""
    first_fall: float = between(0.1, 0.0, 1.0)
    """Fall of the loss, as a fraction of the first loss, from which small weights do no harm."""
    readings: int = between(20, 1, counts="readings")
    """Number of losses to wait for before small weights are judged."""
    tensors: int = between(2, 1)
    """Minimum number of matrices that are judged."""


@rule(
    "W108", "initial-scale", reads=("weight/norm", "activation/std", "update/ratio", "train/loss"),
    when=("weight/norm",), per_scope=True, keep=1000,
    explains=(
        "L102", "L104", "L105", "L106", "L107", "G102", "G103", "G104", "G105", "G106", "G107", "G110", "G111", "U101",
        "U102", "U103", "U104", "W102", "W103", "W104", "W106", "A101", "A102", "A103", "A104", "A106", "A107", "A108",
        "E101", "E102", "E103", "E105", "E106", "E107",
    ),
    settings=InitialScale,
    message=(
        Message(
            "The initial weights are too large",
            "median gain {value} · limit {bound} · standard deviation of the outputs {output} · matrices {num_tensors}",
            "each layer makes its input several times larger",
        ),
        Message(
            "The initial weights are too small",
            "median gain {value} · expected at least {bound} · matrices {num_tensors}",
            "each layer makes its input and its gradient many times smaller, so that both vanish",
        ),
    ),
    remedies=(
        for_cause("large", advise(
            "lower_initial_scale", "Make the initial weights smaller",
            "a standard deviation of about 1/√inputs keeps the scale from layer to layer",
        )),
        for_cause("small", advise(
            "raise_initial_scale", "Make the initial weights larger",
            "a standard deviation of about 1/√inputs keeps the scale from layer to layer",
        )),
    ),
)  # fmt: skip
def initial_scale(
    norm: Panel, output: Panel, ratios: Panel, loss: Panel, settings: InitialScale, info: RunInfo
) -> Finding | None:
    """Most layers start with weights on the wrong scale.

    ## Why is this bad?
    A weight matrix should keep the scale of what passes through it. Its gain is about the root mean square of its
    elements times √inputs, near 1 in all usual initializations. With a gain of 5, the outputs, the first loss and the
    gradients explode with depth, tanh and softmax saturate, and the learning rate is too low for weights of this size.
    With a gain of 0.05, signals and gradients vanish, and the first steps rewrite the weights.

    The median over all matrices but embeddings counts, so that a single layer may start at zero. Large weights count
    only if the outputs are large too: some models scale their weights in `forward`. Small ones count if the
    first step rewrites them, or while the loss has not begun to fall.

    ## Example
    fires: weight/norm{a.weight} 10.0 | weight/norm{b.weight} 12.0 | activation/std{a} 5.0 | activation/std{b} 30.0
    fires: weight/norm{a.weight} 0.01x30 | weight/norm{b.weight} 0.01x30 | train/loss 2.3x30
    fires: weight/norm{a.weight} 0.01 | weight/norm{b.weight} 0.01 | update/ratio{a.weight} 2 | update/ratio{b.weight} 2
    quiet: weight/norm{a.weight} 1.0 | weight/norm{b.weight} 1.0 | activation/std{a} 5.0 | activation/std{b} 30.0
    quiet: weight/norm{a.weight} 10.0 | weight/norm{b.weight} 12.0 | activation/std{a} 1.0 | activation/std{b} 1.0
    quiet: weight/norm{a.weight} 0.01x30 | weight/norm{b.weight} 0.01x30 | train/loss 2.3-0.05x30
    """
    if not len(norm) or norm.steps[0] > 0:
        return None
    inner, outer = gain_factors(norm.scopes, info)
    start = _before_the_first_step(norm, ratios)
    judged = (start > 0) & np.isfinite(start) & (inner > 0) & np.isfinite(norm.last)
    if np.count_nonzero(judged) < settings.tensors:
        return None
    least, most = median((start * inner)[judged]), median((start * outer)[judged])
    evidence = {"num_tensors": float(np.count_nonzero(judged)), "lasting_steps": float(norm.at + 1)}
    if least > settings.large:
        spread = _of_layers(output, {scope.rpartition(".")[0] for scope in np.array(norm.scopes, object)[judged]})
        if spread > settings.output:
            return finding(Severity.WARNING, least, settings.large, "", cause="large", output=spread, **evidence)
    if most < settings.small and (_is_rewritten(ratios, judged, settings) or _stands_still(loss.series(), settings)):
        return finding(Severity.WARNING, most, settings.small, "", cause="small", **evidence)
    return None


def _before_the_first_step(norm: Panel, ratios: Panel) -> Floats:
    """The initial norms. They are read after the first step, which may have made tiny weights many times larger."""
    after: Floats = norm.values[0].astype(np.float64)
    if not len(ratios) or ratios.steps[0] > 0 or ratios.scopes != norm.scopes:
        return after
    with np.errstate(invalid="ignore"):
        before: Floats = after / np.fmax(ratios.values[0], 1.0)
    return before


def _is_rewritten(ratios: Panel, judged: Bools, settings: InitialScale) -> bool:
    """Whether the first step changed most of the weights."""
    is_known = len(ratios) and ratios.steps[0] == 0 and len(ratios.scopes) == len(judged)
    return bool(is_known and median(ratios.values[0, judged]) > settings.rewritten)


def _stands_still(loss: Series, settings: InitialScale) -> bool:
    """Whether the loss has not begun to fall."""
    losses = loss.finite()
    if len(losses) < settings.readings:
        return False
    return not median(losses[-settings.readings // 4 :]) < losses[0] - settings.first_fall * abs(losses[0])


def _of_layers(output: Panel, layers: set[str]) -> float:
    """The median of the first reading of these layers' outputs; NaN if there is none."""
    index = [place for place, scope in enumerate(output.scopes) if scope.partition("[")[0] in layers]
    return median(output.values[0, index]) if len(output) and index else math.nan


@dataclass(frozen=True, kw_only=True)
class InitialScaleThresholds(Settings):
    """The settings of the rules in this file, by the name of the rule."""

    initial_scale: InitialScale = InitialScale()
