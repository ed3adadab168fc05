"""Rules about layer outputs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from forewarn.judge.headlines import Message
from forewarn.judge.objective import is_objective
from forewarn.judge.registry import NO_BOUND, finding, rule
from forewarn.judge.remedies import advise, clip_gradient, for_cause, lower_lr, roll_back, snapshot, warm_up
from forewarn.judge.series import Bools, Floats, Panel, Series, trailing, usual_levels
from forewarn.judge.tensor_kinds import is_matrix, layer_of, layer_widths, never_called
from forewarn.settings import Settings, between
from forewarn.types import BatchNormState, Finding, FrozenCause, RunInfo, Severity, Values

_ZERO_GRADIENT = float(FrozenCause.ZERO_GRADIENT)
_WHOLE = 1e-3
"""Largest distance of a whole number of units from one, since fractions are rounded."""
_PARTS = 10
"""The loss has fallen if the newest tenth of its history is below the oldest tenth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadUnits(Settings):
    """When `dead-units` fires."""

    share: float = between(0.5, 0.0, 1.0)
    """Fraction of a layer's units that must be dead to warn."""
    critical: float = between(0.99, 0.0, 1.0)
    """Fraction of dead units that is critical: almost nothing passes through the layer."""
    starving_share: float = between(0.25, 0.0, 1.0)
    """The same while a matrix of the model has a gradient of exactly zero. A module that is called for several layers
    has one reading for all of them, and a dead layer among them stops the gradient."""
    significance: float = between(2.0, 0.0)
    """Standard errors of the fraction by which it must exceed `share`: of a few channels, half may be off by chance,
    as where all inputs are positive."""

    @classmethod
    def _moved(cls) -> Mapping[str, str]:
        return {"window": "measure.dead_unit_window", "positions": "measure.dead_unit_positions"}


@rule(
    "A101", "dead-units",
    reads=(
        "activation/dead_fraction", "activation/zero_fraction", "update/frozen_cause", "train/loss",
        "update/separate_losses",
    ),
    when=("activation/dead_fraction",), per_scope=True, keep=200,
    explains=(
        "L104", "L105", "G103", "G107", "U101", "U102", "U103", "W104", "W106", "A104", "E102", "E103", "E105", "E106",
    ),
    settings=DeadUnits,
    message=Message(
        "{value:%} of the units in {scope} are always zero",
        "dead units {value:%} · limit {bound:%} · zero outputs {zero_fraction:%} · steps observed {lasting_steps}",
    ),
    remedies=(
        advise("lower_bias", "Initialize the bias that feeds {scope} to {to}",
               "a strongly negative bias keeps units off for every input", scope_is="layer", to=0.0),
        lower_lr(0.5, "a single step that is too large can push a unit below zero for good"),
        advise("replace_activation", "Replace {scope} with LeakyReLU(negative_slope={negative_slope})",
               "LeakyReLU and GELU pass a gradient where ReLU passes none", scope_is="layer", negative_slope=0.01),
        advise("reinitialize_units", "Reinitialize the dead units in {scope}",
               "a unit that is off for every input has no gradient and cannot recover", scope_is="layer"),
    ),
)  # fmt: skip
def dead_units(
    dead: Panel, zeros: Panel, causes: Panel, loss: Panel, separate: Panel, settings: DeadUnits, info: RunInfo
) -> Iterator[Finding]:
    """Many units of a ReLU layer are zero for every input.

    ## Why is this bad?
    A unit that is off for every input gets no gradient, so it never recovers, and the layer loses that part of its
    width. Large steps, strongly negative biases and inputs that are not centred cause this.

    A unit that is zero for most inputs is selective, not dead. In a healthy layer half or even 90% of all values may be
    zero, and that alone never fires. Only units that were zero for every value read over ten measured steps count. A
    quarter of them is enough if a weight has a gradient of exactly zero and others move. In a narrow layer more of them
    must be dead, since half of 16 random filters may be off by chance. In reinforcement learning and in a GAN, many
    units rest while the others learn, and the severity is one level lower.

    ## Example
    fires: activation/dead_fraction{relu} 0.7x2 | activation/zero_fraction{relu} 0.8x2
    fires: activation/dead_fraction{relu} 0.3x2 | update/frozen_cause{a.weight} 5x2 | update/frozen_cause{b.weight} 0x2
    quiet: activation/dead_fraction{relu} 0.1x9 | activation/zero_fraction{relu} 0.9x9
    """
    starved = is_matrix(causes.scopes, info) & (causes.last == _ZERO_GRADIENT)
    starving = causes.at == dead.at and starved.any() and (causes.last == FrozenCause.MOVING.value).any()
    share = min(settings.share, settings.starving_share) if starving else settings.share
    marked = np.flatnonzero(dead.last >= share)
    if not len(marked):
        return
    zero_of = dict(zip(zeros.scopes, zeros.last, strict=True)) if zeros.at == dead.at else {}
    window = info.dead_unit_window
    is_meant = is_objective(loss.series(), separate.series(), info)
    for index in marked:
        scope = dead.scopes[index]
        critical = dead.last[index] >= settings.critical
        error = math.sqrt(share * (1 - share) / _num_units(dead.values[:, index], info))
        bound = settings.critical if critical else min(share + settings.significance * error, settings.critical)
        if dead.last[index] < bound:
            continue
        # A reading is about a window of measured steps, so the units died before the first of these readings.
        readings = trailing(dead.values[:, index] >= share)
        first = int(dead.steps[-readings])
        earlier = zeros.steps[zeros.steps <= first][-window:]
        began = int(earlier[0]) if len(earlier) else first
        severity = Severity.CRITICAL if critical else Severity.WARNING
        yield finding(
            severity if is_meant or starving else Severity(severity - 1), dead.last[index], bound, scope,
            zero_fraction=zero_of.get(scope, math.nan), lasting_steps=dead.at - began + 1,
        )  # fmt: skip


def _num_units(fractions: Values, info: RunInfo) -> float:
    """The smallest width of a layer in the model that has whole numbers of units at these fractions; else infinity."""
    counts = np.outer(layer_widths(info), fractions[np.isfinite(fractions)])
    fitting = layer_widths(info)[(np.abs(counts - np.rint(counts)) < _WHOLE).all(axis=1)]
    return float(fitting[0]) if len(fitting) else math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class SaturatedUnits(Settings):
    """When `saturated-units` fires."""

    share: float = between(0.5, 0.0, 1.0)
    """Fraction of a layer's units, or of a softmax's rows, that must be saturated to warn."""

    @classmethod
    def _moved(cls) -> Mapping[str, str]:
        return {"level": "measure.saturation_level"}


@rule(
    "A102", "saturated-units", reads=("activation/saturated_fraction",), per_scope=True, hold=3, keep=200,
    explains=("G103", "U101", "U103"),
    settings=SaturatedUnits,
    message=Message(
        "{value:%} of {scope} is saturated",
        "saturated fraction {value:%} · limit {bound:%} · counted beyond {beyond:%} of the range",
    ),
    remedies=(
        advise("shrink_inputs", "Normalize the input of {scope}",
               "the input is too large; smaller initial weights in the layer before it help too", scope_is="layer"),
        lower_lr(0.5, "large steps push the inputs of bounded functions into their flat ends"),
        advise("replace_activation", "Replace {scope} with GELU or ReLU", "neither is flat on both sides",
               scope_is="layer"),
        advise("divide_logits", "If {scope} is a softmax, divide its logits by √width",
               "the logits of a softmax grow with the square root of their width", scope_is="layer"),
    ),
)  # fmt: skip
def saturated_units(saturated: Panel, settings: SaturatedUnits, info: RunInfo) -> Iterator[Finding]:
    """A tanh, sigmoid or softmax is stuck where it is flat.

    ## Why is this bad?
    A bounded function is almost flat at the ends of its range, so no gradient passes. A unit of a tanh or sigmoid
    counts if it was at an end for every value read over ten measured steps. A row of a softmax counts if one entry has
    nearly all the weight. A sigmoid or softmax at the output of the model is not judged: it is meant to be confident.

    ## Example
    fires: activation/saturated_fraction{layer.tanh} 0.8x3
    quiet: activation/saturated_fraction{layer.tanh} 0.3x9
    """
    for index in np.flatnonzero(saturated.last >= settings.share):
        yield finding(
            Severity.WARNING,
            saturated.last[index],
            settings.share,
            saturated.scopes[index],
            beyond=info.saturation_level,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplodingActivation(Settings):
    """When `exploding-activation` fires."""

    magnitude: float = between(3e4, 0.0)
    """Largest absolute output allowed, whatever the history: about half the maximum of float16."""
    factor: float = between(10.0, 1.0)
    """Multiple of its usual level, the median over the earlier steps, above which an output has exploded."""
    lasting_checks: int = between(2, 1, counts="readings")
    """Number of checks in a row above that multiple: a single batch may be an outlier."""
    least: float = between(100.0, 0.0)
    """Magnitude below which growth is ignored: logits that grow from 0.1 to 10 are a sign of learning."""
    minimum: int = between(8, 2, counts="readings")
    """Number of earlier checks needed before growth is judged."""
    growth: float = between(3.0, 1.0)
    """Largest ratio of the last of the earlier checks to that median; above it, the layer is still settling."""


@rule(
    "A103", "exploding-activation", reads=("activation/abs_max", "activation/nonfinite", "train/loss"),
    when=("activation/abs_max", "activation/nonfinite"), per_scope=True, keep=50,
    explains=("L101", "L102", "L103", "L107", "L108", "E107", "G101", "G102", "G104", "A108", "M101", "M102", "M103"),
    settings=ExplodingActivation,
    message=(
        Message(
            "The output of {scope} is far too large",
            "largest magnitude {value} · limit {bound} · usual {level} · first affected {first}",
        ),
        Message(
            "The output of {scope} contains NaN or infinity",
            "non-finite values {value} · first affected {first}",
        ),
    ),
    remedies=(
        advise("inspect_layer", "Check the weights of {scope} and the scale of its input",
               "one of them has grown out of range; a normalization before the layer keeps its input in range",
               scope_is="layer"),
        lower_lr(0.5, "weights that grow with every step make the activations grow too"),
        clip_gradient(),
        roll_back(),
        warm_up(),
        advise("compute_in_float32", "Compute {scope} in float32 or bfloat16", "the largest float16 value is 65504",
               scope_is="layer"),
        snapshot(),
    ),
)  # fmt: skip
def exploding_activation(
    largest: Panel, nonfinite: Panel, loss: Panel, settings: ExplodingActivation
) -> Iterator[Finding]:
    """A layer's output is very large, far above its usual level, or not finite.

    ## Why is this bad?
    The next layer multiplies this output. Magnitudes above a few tens of thousands overflow in half precision, saturate
    every softmax behind them and turn into gradients of the same size. The evidence names the first affected layer in
    the order in which layers run.

    Logits that grow from 0.1 to 10 are a sign of learning. Growth below a magnitude of 100 is ignored. Above it, growth
    counts only if the layer had settled and the growth lasts longer than one batch. The time without a reading before
    the growth must be no longer than the history: over a hundred steps, a cell state may grow tenfold bit by bit.

    Non-finite values are reported where they arise. A layer that produced them from its first reading on (a mask of
    -inf) is ignored while the loss is finite. So is a model whose very first layer has them: its input or its weights
    are to blame.

    ## Example
    fires: activation/abs_max{layer.0} 3.0x4 1e5
    fires: activation/abs_max{layer.0} 30.0x12 900.0x2
    fires: activation/nonfinite{layer.0} 0x4 | activation/nonfinite{layer.1} 0x3 8
    quiet: activation/abs_max{layer.0} 30.0x12 900.0 30.0x5
    quiet: activation/abs_max{layer.0} 0.1x12 20.0x5
    quiet: activation/abs_max{layer.0} 20.0+20.0x30
    quiet: activation/nonfinite{layer.0} 0x4 | activation/nonfinite{layer.1} 8x4
    """
    now = max(largest.at, nonfinite.at)
    bad = _arising(nonfinite, loss, now)
    for index in np.flatnonzero(bad):
        yield finding(
            Severity.CRITICAL, nonfinite.last[index], 0.0, nonfinite.scopes[index], first=_first(nonfinite, bad)
        )
    if largest.at != now:
        return
    reported = {nonfinite.scopes[index] for index in np.flatnonzero(bad)}
    level, risen = _risen(largest, settings)
    large = largest.last > settings.magnitude
    marked = (large | risen) & np.isfinite(largest.last)
    for index in np.flatnonzero(marked):
        if largest.scopes[index] not in reported:
            bound = settings.magnitude if large[index] else settings.factor * level[index]
            yield finding(
                Severity.WARNING, largest.last[index], bound, largest.scopes[index],
                level=level[index], first=_first(largest, marked),
            )  # fmt: skip


def _first(panel: Panel, marked: Bools) -> str:
    """The first marked layer to run; scopes are in the order in which layers were first seen."""
    return panel.scopes[int(np.argmax(marked))]


def _arising(nonfinite: Panel, loss: Panel, now: int) -> Bools:
    """Layers whose output has become non-finite; none if the very first layer is among them."""
    if nonfinite.at != now or not len(nonfinite):
        return np.zeros(len(nonfinite.scopes), np.bool_)
    lost = len(loss) > 0 and not math.isfinite(loss.series().last)
    bad: Bools = (nonfinite.last > 0) & (lost | (nonfinite.values[0] == 0))
    return bad & (not (len(bad) and nonfinite.last[0] > 0))


def _risen(largest: Panel, settings: ExplodingActivation) -> tuple[Floats, Bools]:
    """Each layer's usual level, and whether its newest values are all far above it; NaN and False without one."""
    level = np.full(len(largest.scopes), np.nan)
    risen = np.zeros(len(level), np.bool_)
    earlier, newest = largest.values[: -settings.lasting_checks], largest.values[-settings.lasting_checks :]
    if len(earlier) < settings.minimum or not len(large := np.flatnonzero((newest > settings.least).all(axis=0))):
        return level, risen
    steps, gap = largest.steps[: -settings.lasting_checks], largest.longest_gap(settings.lasting_checks)
    if steps[-1] - steps[0] < gap:
        return level, risen
    for index in large:
        finite = np.isfinite(earlier[:, index])
        if np.count_nonzero(finite) >= settings.minimum:
            column = earlier[finite, index]
            level[index] = usual_levels(steps[finite], column[:, None])[0]
            settled = column[-1] <= settings.growth * level[index] and level[index] > 0
            risen[index] = settled and (newest[:, index] > settings.factor * level[index]).all()
    return level, risen


@dataclass(frozen=True, slots=True, kw_only=True)
class RepresentationCollapse(Settings):
    """When `representation-collapse` fires."""

    cosine: float = between(0.999, 0.0, 1.0)
    """Mean cosine similarity of the last hidden states at which they count as identical."""
    differed: float = between(0.99, 0.0, 1.0)
    """Mean cosine similarity below which samples differed before; just below `cosine`, they never did."""
    rank: float = between(1.05, 1.0)
    """Effective rank at or below which the hidden states vary along a single line."""
    outputs: int = between(3, 1)
    """Minimum number of outputs for a single line to be too few: two classes need no more."""
    earlier_rank: float = between(2.0, 1.0)
    """Effective rank that must have been reached before: a rank that was always low did not collapse."""
    minimum: int = between(10, 1, counts="readings")
    """Number of checks needed before anything is judged."""
    learning: float = between(0.1, 0.0, 1.0)
    """Fraction by which the loss must have fallen in memory for a single line to be information only."""


@rule(
    "A104", "representation-collapse",
    reads=("activation/row_cosine", "activation/effective_rank", "train/loss", "update/separate_losses"),
    per_scope=True, hold=3, keep=200, explains=("G103", "U103"),
    settings=RepresentationCollapse,
    message=(
        Message(
            "Samples reaching {scope} differ in only one direction",
            "effective rank {value} · limit {bound} · highest before {earlier_rank}",
        ),
        Message(
            "All samples look the same to {scope}",
            "mean cosine similarity {value} · limit {bound} · effective rank {effective_rank}",
        ),
    ),
    remedies=(
        advise("check_inputs", "Check that the samples in the batch of step {step} differ",
               "identical inputs have identical hidden states", scope_is="layer"),
        advise("check_objective", "Check that the loss does not reward identical representations",
               "a loss that is lowest when all representations agree needs negatives, a stop-gradient or a variance "
               "term", scope_is="layer"),
        lower_lr(0.3, "a step that is too large can wipe out the differences between inputs"),
        advise("add_residuals", "Add residual connections or normalization before {scope}",
               "deep layers without them map all inputs to the same output", scope_is="layer"),
    ),
)  # fmt: skip
def representation_collapse(
    cosine: Panel, rank: Panel, loss: Panel, separate: Panel, settings: RepresentationCollapse, info: RunInfo
) -> Iterator[Finding]:
    """The last hidden states are all alike, or vary along a single line.

    ## Why is this bad?
    The last layer can only tell apart what reaches it. If all rows of its input point the same way, the model gives the
    same answer for every input, however low the loss looks. If they lie on one line, it can rank its inputs but do no
    more.

    Two cases do not count. Rows after a ReLU naturally have a cosine of 0.5 to 0.98. A model for two classes needs only
    one line. A language model learns word frequencies first, and these lie on a line: while the loss falls, a single
    line is information only. A critic, or any head with a single output, may begin with a constant, and a policy with
    states that are all alike. These fire only if samples differed before. In reinforcement learning, a single output is
    information even then: returns far from zero turn the states of a critic in one direction.

    ## Example
    fires: activation/row_cosine{head} 0.6x10 0.9999x3
    fires: activation/row_cosine{head} 0.6x13 | activation/effective_rank{head} 9.0x10 1.01x3
    quiet: activation/row_cosine{head} 0.98x30
    quiet: activation/row_cosine{head} 0.6x30 | activation/effective_rank{head} 1.3x30
    """
    if len(cosine) < settings.minimum:
        return
    ranks = dict(zip(rank.scopes, rank.values.T, strict=True)) if rank.at == cosine.at else {}
    is_meant = is_objective(loss.series(), separate.series(), info)
    for index, scope in enumerate(cosine.scopes):
        value, column = cosine.last[index], ranks.get(scope, np.empty(0, np.float32))
        newest = float(column[-1]) if len(column) else math.nan
        if value >= settings.cosine:
            differed, is_single = (cosine.values[:, index] < settings.differed).any(), _num_outputs(scope, info) == 1
            if differed or (is_meant and not is_single):
                severity = Severity.INFO if is_single and not is_meant else Severity.WARNING
                yield finding(severity, value, settings.cosine, scope, effective_rank=newest)
        elif newest <= settings.rank and _num_outputs(scope, info) >= settings.outputs:
            finite_ranks = column[np.isfinite(column)]
            if finite_ranks.max(initial=0.0) >= settings.earlier_rank:
                severity = Severity.INFO if _falls(loss.series(), settings.learning) else Severity.WARNING
                yield finding(severity, newest, settings.rank, scope, row_cosine=value, earlier_rank=finite_ranks.max())


def _falls(loss: Series, share: float) -> bool:
    """Whether the loss has fallen by this share since the oldest part of its history."""
    before, now = loss.ends(_PARTS)
    return now < before - share * abs(before)


def _num_outputs(scope: str, info: RunInfo) -> float:
    """A layer's number of outputs, from the shape of its weight; infinity if it has no weight."""
    weight = info.parameters.get(f"{scope}.weight")
    return weight.shape[0] if weight and weight.shape else math.inf


@rule(
    "A105", "batchnorm-in-eval", reads=("activation/batchnorm_state", "activation/mean"),
    when=("activation/batchnorm_state",), per_scope=True, hold=2, keep=100,
    explains=("L102", "L103", "L107", "L108", "E107", "G102", "G104", "X103"),
    message=Message("{scope} does not update its running statistics", "", "{cause:words}"),
    remedies=(
        for_cause(BatchNormState.IN_EVALUATION, advise(
            "call_train", "Call `model.train()` before the training step",
            "after an evaluation the model stays in evaluation mode until then", scope_is="layer",
        )),
        for_cause(BatchNormState.STANDS_STILL, advise(
            "set_momentum", "Set the momentum of {scope} to {to}",
            "with a momentum of 0 the running statistics never change", scope_is="layer", to=0.1,
        )),
        advise("freeze_on_purpose", "If this is intended, freeze the weight and bias of {scope}",
               "a batch norm with `requires_grad=False` counts as frozen on purpose", scope_is="layer"),
    ),
)  # fmt: skip
def batchnorm_in_eval(states: Panel, outputs: Panel, info: RunInfo) -> Iterator[Finding]:
    """A batch normalization layer trains without updating its running statistics.

    ## Why is this bad?
    In evaluation mode the layer normalizes by old averages. Activations drift away from them as the weights change, and
    gradients no longer depend on the batch. The usual cause is a missing `model.train()` after an evaluation, which
    turns off dropout as well.

    If the layer is in training mode but its statistics never change (a momentum of 0), training is right and every
    evaluation is wrong. A layer in evaluation mode whose own weights are frozen, as in fine-tuning, is intended and not
    reported. Nor is a layer that the forward pass never calls.

    ## Example
    fires: activation/batchnorm_state{norm} 0x3 1x2
    fires: activation/batchnorm_state{norm} 0 2x2
    quiet: activation/batchnorm_state{norm} 3x5
    """
    forgotten = np.flatnonzero(np.isin(states.last, _FORGOTTEN))
    unused = {layer_of(name) for name in never_called(outputs, info)} if len(forgotten) else set()
    for index in forgotten:
        state = BatchNormState(int(states.last[index]))
        if state is BatchNormState.STANDS_STILL and states.scopes[index] in unused:
            continue
        yield finding(Severity.WARNING, states.last[index], NO_BOUND, states.scopes[index], cause=state.name.lower())


_FORGOTTEN = (float(BatchNormState.IN_EVALUATION), float(BatchNormState.STANDS_STILL))


@dataclass(frozen=True, kw_only=True)
class ActivationThresholds(Settings):
    """The settings of the rules in this file, by the name of the rule."""

    dead_units: DeadUnits = DeadUnits()
    saturated_units: SaturatedUnits = SaturatedUnits()
    exploding_activation: ExplodingActivation = ExplodingActivation()
    representation_collapse: RepresentationCollapse = RepresentationCollapse()
