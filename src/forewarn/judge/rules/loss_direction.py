"""Rules about how the loss compares the output with the targets."""

from __future__ import annotations

from dataclasses import dataclass

from forewarn.judge.headlines import Message
from forewarn.judge.registry import NO_BOUND, finding, rule
from forewarn.judge.remedies import advise
from forewarn.judge.series import Series
from forewarn.settings import Settings, between
from forewarn.types import Finding, Severity


@dataclass(frozen=True, slots=True, kw_only=True)
class LossMaximized(Settings):
    """When `loss-maximized` fires."""

    share: float = between(0.95, 0.0, 1.0)
    """Fraction of the rows that the gradient must push away from their target."""


@rule(
    "L110", "loss-maximized", reads=("activation/reversed_rows",), hold=2, keep=500,
    explains=(
        "L101", "L102", "L103", "L107", "L108", "L109", "G101", "G102", "G104", "G105", "G106", "G107", "G110", "G111",
        "U101", "U102", "U104", "W101", "W102", "W106", "A101", "A102", "A103", "A104", "A106", "A107", "A108", "D102",
        "E101", "E102", "E103", "E104", "E107",
    ),
    settings=LossMaximized,
    message=Message(
        "The loss is maximized: its sign is wrong",
        "rows pushed away from their target {value:%} · limit {bound:%}",
        "each step lowers the probability of the right class",
    ),
    remedies=(
        advise("check_sign", "Check the sign of the loss, and of its weight",
               "`cross_entropy` is to be minimized as it is; a log-likelihood needs a minus sign"),
    ),
)  # fmt: skip
def loss_maximized(reversed_rows: Series, settings: LossMaximized) -> Finding | None:
    """The gradient of the loss pushes the output away from the targets.

    ## Why is this bad?
    The optimizer does what it is told: every step makes the right class less likely. The loss falls without limit and
    soon overflows. In the gradient of a softmax loss, the value of the target alone is negative. If it is the only
    positive one in almost every row, the sign is wrong. A policy gradient has some of both.

    ## Example
    fires: 1.0x2
    quiet: 0.0x2
    quiet: 0.5x9
    """
    if not reversed_rows.last >= settings.share:
        return None
    return finding(Severity.WARNING, reversed_rows.last, settings.share)


@rule(
    "L111", "targets-broadcast", reads=("train/paired_outputs",), hold=3, keep=500,
    explains=(
        "L104", "L105", "G103", "G107", "U103", "A101", "A104", "E102", "E103", "E105", "E106",
    ),
    message=Message(
        "The loss compares every output with every target",
        "outputs {value}",
        "output and target have different shapes, n × 1 and n, and broadcasting makes n × n differences of them",
    ),
    remedies=(
        advise("match_shapes", "Give output and target the same shape: `output.squeeze(-1)` or `target.unsqueeze(-1)`",
               "each output is then compared with its own target alone"),
    ),
)  # fmt: skip
def targets_broadcast(paired: Series) -> Finding | None:
    """The loss compares every output of the batch with every target.

    ## Why is this bad?
    An output of shape n × 1 minus a target of shape n gives n × n differences. Their mean is lowest if every output is
    the mean of the targets, so the model learns to ignore its input. Nothing fails: the loss falls to the variance of
    the targets and stays there. PyTorch warns once, if the loss is one of its own.

    The graph behind the loss shows it, if `monitor.step` gets the loss as a tensor. The distances between all pairs of
    outputs, as in a ranking or contrastive loss, are meant and not reported.

    ## Example
    fires: 32x3
    quiet: 0x9
    """
    return finding(Severity.WARNING, paired.last, NO_BOUND) if paired.last > 0 else None


@dataclass(frozen=True, kw_only=True)
class LossDirectionThresholds(Settings):
    """The settings of the rules in this file, by the name of the rule."""

    loss_maximized: LossMaximized = LossMaximized()
