"""Rules about what the layers give."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from forewarn.judge.headlines import Message
from forewarn.judge.registry import NO_BOUND, finding, rule
from forewarn.judge.remedies import advise, clip_gradient, lower_lr, roll_back, snapshot, warm_up
from forewarn.judge.series import Bools, Floats, Panel, Series
from forewarn.settings import Settings, between
from forewarn.types import BatchNormState, Finding, RunInfo, Severity

_PARTS = 10
"""A loss has fallen if its newest tenth in memory lies below its oldest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadUnits(Settings):
    """When `dead-units` fires."""

    share: float = between(0.5, 0.0, 1.0)
    """Share of the units of a layer that are dead at which to warn."""
    critical: float = between(0.99, 0.0, 1.0)
    """The share that is critical: nothing passes through the layer any more."""

    @classmethod
    def _moved(cls) -> Mapping[str, str]:
        return {"window": "measure.dead_unit_window", "positions": "measure.dead_unit_positions"}


@rule(
    "A101", "dead-units", reads=("activation/dead_fraction", "activation/zero_fraction"), per_scope=True, keep=200,
    explains=("G103", "U101", "U103"),
    settings=DeadUnits,
    message=Message(
        "{value:%} of the units in {scope} are always zero",
        "dead units {value:%} · limit {bound:%} · over {lasting_steps} steps",
    ),
    remedies=(
        advise("lower_bias", "Lower bias", "a bias far below zero keeps units off for every input: start it at 0", scope_is="layer",
               to=0.0),
        lower_lr(0.5, "one step that is too large pushes a unit below zero for good"),
        advise("replace_activation", "Replace activation", "LeakyReLU and GELU pass a gradient where ReLU has none", scope_is="layer",
               negative_slope=0.01),
        advise("reinitialise_units", "Reinitialise units", "a unit that is off on every input has no gradient and does not come back",
               scope_is="layer"),
    ),
)  # fmt: skip
def dead_units(dead: Panel, zeros: Panel, settings: DeadUnits, info: RunInfo) -> Iterator[Finding]:
    """Units of a ReLU that are zero on every input.

    ## Why is this bad?
    A unit that is off for all inputs has no gradient: it never comes back, and the layer is as much narrower as it has
    such units. Large steps, biases far below zero and inputs that are not centred make them. A unit that is zero on
    most inputs is not dead, it is selective: half of all values, or nine in ten, may be zero in a healthy layer, and
    that alone never fires. Counted are units that were zero on everything that was read in ten measured steps.

    ## Example
    fires: activation/dead_fraction{relu} 0.7x2 | activation/zero_fraction{relu} 0.8x2
    quiet: activation/dead_fraction{relu} 0.1x9 | activation/zero_fraction{relu} 0.9x9
    """
    marked = np.flatnonzero(dead.last >= settings.share)
    if not len(marked):
        return
    zero_of = dict(zip(zeros.scopes, zeros.last, strict=True)) if zeros.at == dead.at else {}
    # The first reading looks back on as many measured steps as any other.
    window = info.dead_unit_window
    began = int(zeros.steps[-window]) if len(zeros) >= window else dead.at
    for index in marked:
        critical = dead.last[index] >= settings.critical
        bound = settings.critical if critical else settings.share
        scope = dead.scopes[index]
        yield finding(
            Severity.CRITICAL if critical else Severity.WARNING, dead.last[index], bound, scope,
            zero_fraction=zero_of.get(scope, math.nan), lasting_steps=max(1, dead.at - began + 1),
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class SaturatedUnits(Settings):
    """When `saturated-units` fires."""

    share: float = between(0.5, 0.0, 1.0)
    """Share of the units of a layer, or of the rows of a softmax, that are saturated at which to warn."""

    @classmethod
    def _moved(cls) -> Mapping[str, str]:
        return {"level": "measure.saturation_level"}


@rule(
    "A102", "saturated-units", reads=("activation/saturated_fraction",), per_scope=True, hold=3, keep=200,
    explains=("G103", "U101", "U103"),
    settings=SaturatedUnits,
    message=Message(
        "{value:%} of the units in {scope} are saturated",
        "saturated units {value:%} · limit {bound:%}",
    ),
    remedies=(
        advise("shrink_inputs", "Shrink inputs", "what comes in is too large: normalise it, or start the weights before it smaller",
               scope_is="layer"),
        lower_lr(0.5, "large steps drive the inputs of bounded functions out to where they are flat"),
        advise("replace_activation", "Replace activation", "GELU and ReLU are not flat on both sides", scope_is="layer"),
        advise("divide_logits", "Divide logits", "the logits of a softmax grow with the square root of their width: divide by it",
               scope_is="layer"),
    ),
)  # fmt: skip
def saturated_units(saturated: Panel, settings: SaturatedUnits, info: RunInfo) -> Iterator[Finding]:
    """Outputs of a tanh, sigmoid or softmax stuck where they are flat.

    ## Why is this bad?
    At the ends of its range a bounded function has almost no slope, and no gradient passes. A unit of a tanh or sigmoid
    counts if it was there on everything that was read in ten measured steps; of a softmax the rows count in which one
    entry has nearly all the weight. A sigmoid or softmax that is the output of the model is not judged: it is meant to
    be sure.

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
    """Largest magnitude at which to warn, whatever came before: half of what float16 can hold."""
    factor: float = between(10.0, 1.0)
    """Times the median of the earlier checks."""
    lasting_checks: int = between(2, 1, counts="readings")
    """Checks in a row that the growth must last for: a single batch may be absurd."""
    least: float = between(100.0, 0.0)
    """Magnitude below which no growth matters: logits of 10 after a start at 0.1 are what learning looks like."""
    minimum: int = between(8, 2, counts="readings")
    """Earlier checks that must have been seen before growth is judged."""
    growth: float = between(3.0, 1.0)
    """Times its oldest kept value up to which that median is a level; above, the layer is still growing into place."""


@rule(
    "A103", "exploding-activation", reads=("activation/abs_max", "activation/nonfinite", "train/loss"),
    when=("activation/abs_max", "activation/nonfinite"), per_scope=True, keep=50,
    explains=("L101", "L102", "L103", "G101", "G102", "G104", "A108", "M101", "M102", "M103"),
    settings=ExplodingActivation,
    message=(
        Message(
            "The output of {scope} is far too large",
            "largest output {value} · limit {bound} · usual {level} · first in {first}",
        ),
        Message(
            "The output of {scope} contains NaN or infinity",
            "non-finite outputs {value} · first in {first}",
        ),
    ),
    remedies=(
        advise("inspect_layer", "Inspect layer", "whatever multiplies here has lost its scale: look at its weights, at what it is "
               "given, and at the normalisation before it", scope_is="layer"),
        lower_lr(0.5, "weights that grow from step to step carry the activations along"),
        clip_gradient(),
        roll_back(),
        warm_up(),
        advise("compute_in_float32", "Compute in float32", "float16 ends at 65504: keep this layer in float32 or bfloat16", scope_is="layer"),
        snapshot(),
    ),
)  # fmt: skip
def exploding_activation(
    largest: Panel, nonfinite: Panel, loss: Panel, settings: ExplodingActivation
) -> Iterator[Finding]:
    """Output of a layer that is very large, or far above its own level, or not finite.

    ## Why is this bad?
    What a layer gives, the next one multiplies. Magnitudes beyond a few ten thousand overflow in half precision, starve
    every softmax behind them and turn into gradients of the same size. The evidence names the first such layer, in the
    order in which they run.

    Logits that grow from 0.1 to 10 are learning: below a magnitude of 100 no growth counts, and above it only that of a
    layer which had found its level, if it lasts longer than one batch. Values that are not finite count where they
    arise: a layer that gave them from its first reading on (a mask of -inf) is left alone while the loss is finite, and
    so is a model whose very first layer has them, for then its input or its weights are to blame.

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
    """The marked layer that runs first: scopes are in the order in which layers were first seen."""
    return panel.scopes[int(np.argmax(marked))]


def _arising(nonfinite: Panel, loss: Panel, now: int) -> Bools:
    """The layers whose values have become non-finite, unless the first layer of all is among them."""
    if nonfinite.at != now or not len(nonfinite):
        return np.zeros(len(nonfinite.scopes), np.bool_)
    lost = len(loss) > 0 and not math.isfinite(Series(loss).last)
    bad: Bools = (nonfinite.last > 0) & (lost | (nonfinite.values[0] == 0))
    return bad & (not (len(bad) and nonfinite.last[0] > 0))


def _risen(largest: Panel, settings: ExplodingActivation) -> tuple[Floats, Bools]:
    """The level of each layer, and whether its newest values are all far above it; NaN and False without a level."""
    level = np.full(len(largest.scopes), np.nan)
    risen = np.zeros(len(level), np.bool_)
    earlier, newest = largest.values[: -settings.lasting_checks], largest.values[-settings.lasting_checks :]
    if len(earlier) < settings.minimum:
        return level, risen
    for index in np.flatnonzero((newest > settings.least).all(axis=0)):
        column = earlier[np.isfinite(earlier[:, index]), index]
        if len(column) >= settings.minimum:
            level[index] = np.median(column)
            settled = 0 < level[index] <= settings.growth * float(column[0])
            risen[index] = settled and (newest[:, index] > settings.factor * level[index]).all()
    return level, risen


@dataclass(frozen=True, slots=True, kw_only=True)
class RepresentationCollapse(Settings):
    """When `representation-collapse` fires."""

    cosine: float = between(0.999, 0.0, 1.0)
    """Mean cosine of the rows of the last hidden state at which they are all the same."""
    rank: float = between(1.05, 1.0)
    """Effective rank at or below which they differ along one line only."""
    outputs: int = between(3, 1)
    """Outputs that the last layer must have for that line to be too few: two classes need no more."""
    earlier_rank: float = between(2.0, 1.0)
    """Effective rank that there must have been before: what never had more did not collapse."""
    minimum: int = between(10, 1, counts="readings")
    """Checks that must have been seen before anything is judged."""
    learning: float = between(0.1, 0.0, 1.0)
    """Share by which the loss must have fallen within memory for rows on one line to be information."""


@rule(
    "A104", "representation-collapse",
    reads=("activation/row_cosine", "activation/effective_rank", "train/loss"), per_scope=True, hold=3,
    keep=200, explains=("G103", "U103"),
    settings=RepresentationCollapse,
    message=(
        Message(
            "All inputs look nearly the same to {scope}",
            "effective rank {value} · limit {bound} · earlier {earlier_rank}",
        ),
        Message(
            "All inputs look the same to {scope}",
            "mean cosine similarity {value} · limit {bound} · effective rank {effective_rank}",
        ),
    ),
    remedies=(
        advise("check_inputs", "Check inputs", "if every input of a batch is the same, so is what becomes of it", scope_is="layer"),
        advise("check_objective", "Check objective", "a loss that is lowest when all representations agree makes them agree: it needs "
               "negatives, a stop-gradient or a term for variance", scope_is="layer"),
        lower_lr(0.3, "a step that is too large can wipe out what tells inputs apart"),
        advise("add_residuals", "Add residuals", "deep layers without residual connections or normalisation map all inputs to one",
               scope_is="layer"),
    ),
)  # fmt: skip
def representation_collapse(
    cosine: Panel, rank: Panel, loss: Panel, settings: RepresentationCollapse, info: RunInfo
) -> Iterator[Finding]:
    """Last hidden states that are all alike, or differ along one line only.

    ## Why is this bad?
    The last layer can only tell apart what reaches it. Where the rows of its input all point the same way, the model
    gives everyone the same answer, however low its loss looks; where they lie on one line it can order its inputs and
    no more. Rows after a ReLU have a positive cosine by nature, of 0.5 to 0.98, and a model for two classes needs one
    line only: neither counts. A language model learns the frequencies of words first, and these lie on a line: while
    the loss falls, one line is information.

    ## Example
    fires: activation/row_cosine{head} 0.6x10 0.9999x3
    fires: activation/row_cosine{head} 0.6x13 | activation/effective_rank{head} 9.0x10 1.01x3
    quiet: activation/row_cosine{head} 0.98x30
    quiet: activation/row_cosine{head} 0.6x30 | activation/effective_rank{head} 1.3x30
    """
    if len(cosine) < settings.minimum:
        return
    ranks = dict(zip(rank.scopes, rank.values.T, strict=True)) if rank.at == cosine.at else {}
    for index, scope in enumerate(cosine.scopes):
        value, column = cosine.last[index], ranks.get(scope, np.empty(0, np.float32))
        newest = float(column[-1]) if len(column) else math.nan
        if value >= settings.cosine:
            yield finding(Severity.WARNING, value, settings.cosine, scope, effective_rank=newest)
        elif newest <= settings.rank and _num_outputs(scope, info) >= settings.outputs:
            finite_ranks = column[np.isfinite(column)]
            if finite_ranks.max(initial=0.0) >= settings.earlier_rank:
                severity = Severity.INFO if _falls(Series(loss), settings.learning) else Severity.WARNING
                yield finding(severity, newest, settings.rank, scope, row_cosine=value, earlier_rank=finite_ranks.max())


def _falls(loss: Series, share: float) -> bool:
    """Whether the loss is lower by this share than the oldest part in memory."""
    before, now = loss.ends(_PARTS)
    return now < before - share * abs(before)


def _num_outputs(scope: str, info: RunInfo) -> float:
    """The number of outputs of a layer, by the shape of its weight; infinity if it has none."""
    weight = info.parameters.get(f"{scope}.weight")
    return weight.shape[0] if weight and weight.shape else math.inf


@rule(
    "A105", "batchnorm-in-eval", reads=("activation/batchnorm_state",), per_scope=True, hold=2, keep=100,
    explains=("L102", "L103", "G102", "G104", "X103"),
    message=Message("The batch norm {scope} does not update its running statistics", "state {state:words}"),
    remedies=(
        advise("call_train", "Call train", "model.train() at the top of the training loop: an evaluation in between leaves it in "
               "evaluation mode", scope_is="layer"),
        advise("freeze_on_purpose", "Freeze on purpose", "requires_grad_(False) on its weight and bias says that it is meant",
               scope_is="layer"),
        advise("set_momentum", "Set momentum", "at a momentum of 0 the running statistics never move", scope_is="layer", to=0.1),
    ),
)  # fmt: skip
def batchnorm_in_eval(states: Panel) -> Iterator[Finding]:
    """Batch normalisation that trains with running statistics which do not follow the data.

    ## Why is this bad?
    In evaluation mode it normalises by averages from before: activations drift away from them as the weights move, and
    gradients no longer see the batch. Most often `model.train()` was not called again after an evaluation, which turns
    off dropout as well. Where the layer is in training mode but its statistics stand still (a momentum of 0), training
    is right and every evaluation is wrong. A layer in evaluation mode whose own weights are frozen, as in fine-tuning,
    is meant to be so and is not reported.

    ## Example
    fires: activation/batchnorm_state{norm} 0x3 1x2
    fires: activation/batchnorm_state{norm} 0 2x2
    quiet: activation/batchnorm_state{norm} 3x5
    """
    for index in np.flatnonzero(np.isin(states.last, _FORGOTTEN)):
        state = BatchNormState(int(states.last[index]))
        yield finding(Severity.WARNING, states.last[index], NO_BOUND, states.scopes[index], state=state.name.lower())


_FORGOTTEN = (float(BatchNormState.IN_EVALUATION), float(BatchNormState.STANDS_STILL))


@dataclass(frozen=True, kw_only=True)
class ActivationThresholds(Settings):
    """The settings of the rules in this file, by the name of the rule."""

    dead_units: DeadUnits = DeadUnits()
    saturated_units: SaturatedUnits = SaturatedUnits()
    exploding_activation: ExplodingActivation = ExplodingActivation()
    representation_collapse: RepresentationCollapse = RepresentationCollapse()
