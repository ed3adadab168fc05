"""Rules about the scale of the model's output."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from forewarn.judge.growth import LogitGrowth, severity_of, too_large
from forewarn.judge.headlines import Message
from forewarn.judge.registry import finding, rule
from forewarn.judge.remedies import advise, lower_lr
from forewarn.judge.series import Series
from forewarn.settings import Settings
from forewarn.types import Finding


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputLogitDrift(LogitGrowth):
    """When `output-logit-drift` fires."""


@rule(
    "A108", "output-logit-drift", reads=("activation/log_z",), hold=3, keep=200,
    explains=("L101", "G101"),
    settings=OutputLogitDrift,
    message=Message(
        "The output logits are drifting away from zero",
        "log-normalizer {value} · limit {bound} · earlier {began_at}",
    ),
    remedies=(
        advise("add_z_loss", "Add z loss", "weight · log²Z beside the loss keeps log Z near 0 and costs nothing else (PaLM)",
               weight=1e-4),
        advise("drop_output_bias", "Drop output bias", "a bias of the last layer can shift all logits together, which teaches nothing"),
        lower_lr(0.5),
    ),
)  # fmt: skip
def output_logit_drift(log_z: Series, settings: OutputLogitDrift) -> Finding | None:
    """Output logits that drift away from zero all together.

    ## Why is this bad?
    A softmax does not change when all of its logits are shifted, so the loss holds nothing in place: their
    log-normaliser log Z can wander off while the loss looks fine. Far from zero, logits lose their precision in
    bfloat16, and in float32 the loss does later; large models were seen to diverge this way (Chowdhery et al. 2022). A
    healthy run begins near the logarithm of the number of classes and moves by a few units.

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


@dataclass(frozen=True, kw_only=True)
class LogitThresholds(Settings):
    """The settings of the rules in this file, by the name of the rule."""

    output_logit_drift: OutputLogitDrift = OutputLogitDrift()
