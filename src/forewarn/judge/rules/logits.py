"""Rules about the scale of the model's output."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from forewarn.judge.growth import LogitGrowth, severity_of, too_large
from forewarn.judge.headlines import Message
from forewarn.judge.registry import finding, rule
from forewarn.judge.remedies import advise, for_cause, lower_lr
from forewarn.judge.series import Series
from forewarn.settings import Settings, between
from forewarn.types import Finding, Severity


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputLogitDrift(LogitGrowth):
    """When `output-logit-drift` fires."""


@rule(
    "A108", "output-logit-drift", reads=("activation/log_z",), hold=3, keep=200,
    explains=("L101", "G101"),
    settings=OutputLogitDrift,
    message=Message(
        "The output logits are drifting away from zero",
        "log-normalizer log Z {value} · limit {bound} · earlier {began_at}",
    ),
    remedies=(
        advise("add_z_loss", "Add a z-loss of {weight} × log²Z to the loss",
               "it keeps log Z near zero at almost no cost (PaLM)", weight=1e-4),
        advise("drop_output_bias", "Remove the bias of the output layer",
               "this bias can shift all logits together, which never helps the loss"),
        lower_lr(0.5),
    ),
)  # fmt: skip
def output_logit_drift(log_z: Series, settings: OutputLogitDrift) -> Finding | None:
    """The output logits drift away from zero together.

    ## Why is this bad?
    A softmax ignores a shift of all its logits, so the loss does not hold them in place. Their log-normalizer log Z
    can drift while the loss looks fine. Far from zero, logits lose precision, first in bfloat16 and later in float32.
    Large models have diverged this way (Chowdhery et al. 2022). In a healthy run, log Z starts near the logarithm of
    the number of classes and moves by a few units.

    ## Example
    fires: 5.5+3x20
    fires: 5.5x4 -120.0x3
    quiet: 5.5+0.5x40
    quiet: 5.5x4 -120.0x2 5.5
    """
    values = np.abs(log_z.values[-settings.window :])[:, None]
    if not len(values) or not too_large(values, settings)[0]:
        return None
    bound = settings.limit if values[-1, 0] > settings.limit else settings.growing_limit
    return finding(
        severity_of(float(values[-1, 0]), settings), log_z.last, math.copysign(bound, log_z.last),
        began_at=log_z.values[-settings.window :][0],
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class DoubleSoftmax(Settings):
    """When `double-softmax` fires."""

    share: float = between(0.99, 0.0, 1.0)
    """Fraction of the output's rows that must be probabilities already."""


@rule(
    "A110", "double-softmax", reads=("activation/probability_rows", "train/applied_twice"),
    when=("activation/probability_rows", "train/applied_twice"), hold=3, keep=200,
    explains=("L104", "L105", "G103", "G107", "U103", "A102", "E102", "E103", "E105", "E106"),
    settings=DoubleSoftmax,
    message=(
        Message(
            "The loss applies {function} twice",
            "",
            "what goes into the {function} of the loss has been through one already",
        ),
        Message(
            "The loss applies softmax to probabilities",
            "rows that sum to 1 already {value:%} · limit {bound:%}",
            "the model's output has been through a softmax, and the loss applies another",
        ),
    ),
    remedies=(
        for_cause("softmax", advise(
            "remove_softmax", "Pass logits to the loss: remove the softmax in front of it",
            "`cross_entropy` applies log-softmax itself",
        )),
        for_cause("softmax", advise(
            "use_nll_loss", "Or take the logarithm of the probabilities and use `nll_loss`",
            "it expects log-probabilities",
        )),
        for_cause("sigmoid", advise(
            "remove_sigmoid", "Remove one of the two sigmoids",
            "`binary_cross_entropy_with_logits` applies one itself, and `binary_cross_entropy` expects one",
        )),
    ),
)  # fmt: skip
def double_softmax(probabilities: Series, twice: Series, settings: DoubleSoftmax) -> Finding | None:
    """The loss applies softmax or sigmoid to what has been through one already.

    ## Why is this bad?
    A softmax of values between 0 and 1 is almost flat: even a perfect answer among ten classes gets a probability of
    0.23, and the loss cannot fall below 1.46. The gradient is small, and the model learns slowly. Nothing fails.

    The graph behind the loss shows it, if `monitor.step` gets the loss as a tensor. So do outputs of the model that sum
    to 1.

    ## Example
    fires: 1.0x3
    fires: train/applied_twice 1x3
    fires: train/applied_twice 2x3
    quiet: 0.0x3
    quiet: train/applied_twice 0x3
    """
    now = max(probabilities.at, twice.at)
    if twice.at == now and twice.last > 0:
        function = "softmax" if twice.last == 1 else "sigmoid"
        return finding(Severity.WARNING, twice.last, 0.0, function=function, cause=function)
    if not (probabilities.at == now and probabilities.last >= settings.share):
        return None
    return finding(Severity.WARNING, probabilities.last, settings.share, cause="softmax")


@dataclass(frozen=True, kw_only=True)
class LogitThresholds(Settings):
    """The settings of the rules in this file, by the name of the rule."""

    output_logit_drift: OutputLogitDrift = OutputLogitDrift()
    double_softmax: DoubleSoftmax = DoubleSoftmax()
