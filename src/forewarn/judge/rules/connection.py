"""A rule about the monitors of several ranks: whether they are in contact."""

from __future__ import annotations

from forewarn.judge.headlines import Message
from forewarn.judge.registry import NO_BOUND, finding, rule
from forewarn.judge.remedies import advise
from forewarn.judge.series import Series
from forewarn.types import Finding, Severity

_NEVER_MET = 1.0


@rule(
    "X105", "ranks-unconnected", reads=("monitor/ranks_unconnected",),
    message=Message("Readings are those of rank 0 alone", "", "{reason}"),
    remedies=(
        advise("watch_every_rank", "Call watch() and monitor.step() in every process",
               "values of other batches and shards are missing from the readings until all ranks are watched"),
    ),
)  # fmt: skip
def ranks_unconnected(unconnected: Series) -> Finding | None:
    """The monitors of the ranks are not in contact, so readings are those of rank 0 alone.

    ## Why is this bad?
    Training continues unaffected. But from here on, losses and activations are those of the batches of rank 0, and with
    sharded parameters (FSDP, tensor parallelism) norms and counts cover only its shards. Either not every process calls
    `watch` and `monitor.step`, or a rank ended, was closed or fell out of step; the log says which.

    ## Example
    fires: 2
    quiet: 0
    """
    worst = float(unconnected.values.max(initial=0.0))
    if not worst > 0:
        return None
    never = worst == _NEVER_MET
    reason = "not every rank is watched" if never else "contact with another rank was lost"
    return finding(Severity.INFO if never else Severity.WARNING, worst, NO_BOUND, reason=reason)
