"""Rules about the batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from forewarn.judge.headlines import Message
from forewarn.judge.registry import NO_BOUND, finding, rule
from forewarn.judge.remedies import advise, lower_lr
from forewarn.judge.series import Panel, Series, trailing
from forewarn.settings import Settings, between
from forewarn.types import Finding, RunInfo, Severity


@dataclass(frozen=True, slots=True, kw_only=True)
class InputsNotNormalized(Settings):
    """When `inputs-not-normalized` fires."""

    rms: float = between(20.0, 0.0)
    """Root mean square of the first layer's input above which it is not normalized."""


@rule(
    "D101", "inputs-not-normalized", reads=("batch/input_rms", "batch/input_mean"), when=("batch/input_rms",),
    per_scope=True,
    hold=3, keep=200,
    explains=(
        "L101", "L102", "L103", "L105", "L106", "L108", "E107", "G101", "G102", "G104", "G106", "G107", "G110", "G111",
        "U101", "U102", "U104", "W101", "W102", "W103", "A101", "A102", "A103", "A104", "A108", "E105", "E106",
    ),
    settings=InputsNotNormalized,
    message=Message(
        "The inputs of {scope} are not normalized",
        "root mean square {value} · limit {bound} · mean {mean}",
    ),
    remedies=(
        advise("normalize_inputs", "Scale the inputs to a mean of 0 and a standard deviation of 1",
               "images from 0 to 255 need a division by 255 at least", scope_is="layer"),
        lower_lr(0.1, "the first layer's gradient grows with its inputs"),
    ),
)  # fmt: skip
def inputs_not_normalized(size: Panel, mean: Panel, settings: InputsNotNormalized, info: RunInfo) -> Iterator[Finding]:
    """The inputs of the first layer are far from a mean of 0 and a standard deviation of 1.

    ## Why is this bad?
    Initial weights are made for inputs of about 1. Inputs of 100 make outputs, gradients and the first steps a hundred
    times too large: units die, the loss starts high and a learning rate that usually works diverges. Images from 0 to
    255 are the usual case. If a normalization layer follows the first layer, it is only information.

    ## Example
    fires: batch/input_rms{layer} 140.0x3
    quiet: batch/input_rms{layer} 1.2x3
    """
    means = dict(zip(mean.scopes, mean.last, strict=True)) if mean.at == size.at else {}
    for index in np.flatnonzero(size.last > settings.rms):
        scope = size.scopes[index]
        severity = Severity.INFO if _is_normalized_after(scope, info) else Severity.WARNING
        yield finding(severity, size.last[index], settings.rms, scope, mean=means.get(scope, np.nan))


def _is_normalized_after(layer: str, info: RunInfo) -> bool:
    """Whether the next parameters after those of this layer belong to a normalization."""
    names = list(info.parameters)
    places = [place for place, name in enumerate(names) if name.rpartition(".")[0] == layer]
    following = names[places[-1] + 1 :][:1] if places else []
    return any("Norm" in info.parameters[name].kind for name in following)


@dataclass(frozen=True, slots=True, kw_only=True)
class SortedData(Settings):
    """When `sorted-data` fires."""

    batches: int = between(8, 2, counts="readings")
    """Number of measured batches needed."""
    targets: int = between(8, 2)
    """Smallest batch that is judged: in a small one, few classes are chance."""
    classes: float = between(2.0, 1.0)
    """Largest usual number of classes per batch."""


@rule(
    "D102", "sorted-data", reads=("batch/num_classes", "batch/middle_class", "batch/num_targets"), keep=300,
    when=("batch/num_classes",),
    explains=(
        "L102", "L103", "L105", "L106", "L107", "L108", "E107", "G104", "G107", "U102", "U104", "A101", "A104", "E101",
        "E103", "E104",
    ),
    settings=SortedData,
    message=Message(
        "The data is sorted by class",
        "classes per batch {value} · limit {bound} · classes seen in {num_batches} batches {num_seen}",
    ),
    remedies=(
        advise("shuffle_data", "Shuffle the data: `DataLoader(..., shuffle=True)`",
               "a model that sees one class at a time learns to answer it, and forgets it with the next"),
    ),
)  # fmt: skip
def sorted_data(classes: Series, middle: Series, targets: Series, settings: SortedData) -> Finding | None:
    """Each batch holds one or two classes, and other batches hold others.

    ## Why is this bad?
    The model learns to answer the class of the day. The loss is low within a class and jumps at the next one, and what
    was learned is overwritten again and again. Shuffled batches hold a mix of all classes.

    The classes are seen in the gradient of a softmax loss, or given with `monitor.batch`.

    ## Example
    fires: 1x9 | batch/middle_class 0x4 1x3 2x2 | batch/num_targets 32x9
    quiet: 5x9 | batch/middle_class 2x9 | batch/num_targets 32x9
    quiet: 1x9 | batch/middle_class 0x9 | batch/num_targets 32x9
    """
    if len(classes) < settings.batches or np.isnan(classes.last) or targets.at != classes.at:
        return None
    if np.count_nonzero(classes.values > settings.classes) > len(classes) // 2:
        return None  # so is their median
    per_batch = float(np.nanmedian(classes.values))
    if per_batch > settings.classes or np.nanmedian(targets.values) < settings.targets:
        return None  # the batches are mixed
    seen = len(np.unique(middle.finite()))
    if not seen > per_batch:
        return None
    return finding(
        Severity.WARNING, per_batch, settings.classes, num_seen=seen, num_batches=len(classes),
        lasting_steps=classes.at - int(classes.steps[0]) + 1,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatedBatch(Settings):
    """When `repeated-batch` fires."""

    batches: int = between(8, 2, counts="readings")
    """Number of measured batches in a row that must be the same."""


@rule(
    "D103", "repeated-batch", reads=("batch/repeated", "evaluation/epoch", "train/loss"), when=("batch/repeated",),
    keep=300,
    explains=("E101", "E104"),
    settings=RepeatedBatch,
    message=Message("Every step trains on the same batch", "same batches in a row {value} · limit {bound}"),
    remedies=(
        advise("next_batch", "Take a new batch from the loader at every step",
               "`next(iter(loader))` inside the loop starts over every time"),
    ),
)  # fmt: skip
def repeated_batch(repeated: Series, epoch: Series, loss: Series, settings: RepeatedBatch) -> Finding | None:
    """Every measured step saw the same batch.

    ## Why is this bad?
    The model memorizes this batch and sees no other sample. The loss falls to zero, and the validation loss rises. It
    is information, because training on the full batch looks the same. If an epoch has several steps, or earlier batches
    differed, it is a warning.

    ## Example
    fires: 1x8
    quiet: 1x5 0 1x2
    """
    same = repeated.values[-settings.batches :]
    if len(same) < settings.batches or not (same > 0).all():
        return None
    steps = np.searchsorted(loss.steps, epoch.steps[-2:], side="right")
    in_epochs = len(steps) > 0 and float(np.diff(steps, prepend=0 if len(steps) < 2 else steps[0])[-1]) > 1
    others = (repeated.values == 0).any()
    since = int(repeated.steps[-trailing(repeated.values > 0)])
    return finding(
        Severity.WARNING if in_epochs or others else Severity.INFO, len(same), settings.batches,
        lasting_steps=repeated.at - since + 1,
    )  # fmt: skip


@rule(
    "D104", "non-finite-variable", reads=("batch/nan_at_failure", "train/loss"), when=("batch/nan_at_failure",),
    per_scope=True,
    message=Message(
        "The run failed while {scope} held NaN",
        "NaN in it {value} · variables affected {num_variables}",
        "the loss was finite until then, so that most likely the batch or another input of this step held NaN",
    ),
    remedies=(
        advise("inspect_batch", "Look at the batch of the step that failed",
               "a missing value, a division by zero in the preparation or a damaged file puts NaN into a batch",
               scope_is="variable"),
        advise("skip_batch", "Leave out batches for which `torch.isfinite(inputs).all()` is false",
               "one such batch ends the run, or ruins every weight", scope_is="variable"),
    ),
)  # fmt: skip
def non_finite_variable(held: Panel, loss: Panel) -> Finding | None:
    """The run ended with an error while a variable of the loop held NaN.

    ## Why is this bad?
    Many functions refuse NaN with an error that speaks of something else: a distribution about its parameters, a loss
    about the range of its input. The variable that was assigned first is named, as the others follow from it. It is
    seen if the monitor is a context manager, or is closed while the error is handled. If the loss was not finite
    before, `non-finite-loss` has told it.

    ## Example
    fires: batch/nan_at_failure{inputs} _x5 3 | train/loss 2.0x5
    quiet: batch/nan_at_failure{inputs} _x5 3 | train/loss 2.0x4 nan
    """
    losses = loss.series()
    if not (held.last > 0).any() or (len(losses) and not np.isfinite(losses.last)):
        return None
    first = int(np.argmax(held.last > 0))
    return finding(
        Severity.CRITICAL, held.last[first], NO_BOUND, held.scopes[first],
        num_variables=int(np.count_nonzero(held.last > 0)),
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class BatchThresholds(Settings):
    """The settings of the rules in this file, by the name of the rule."""

    inputs_not_normalized: InputsNotNormalized = InputsNotNormalized()
    sorted_data: SortedData = SortedData()
    repeated_batch: RepeatedBatch = RepeatedBatch()
