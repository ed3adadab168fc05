"""Rules about the monitor itself: it reports what it could not do."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from forewarn.judge.headlines import Message
from forewarn.judge.registry import NO_BOUND, finding, rule
from forewarn.judge.remedies import advise
from forewarn.judge.series import Panel, Series
from forewarn.types import Finding, Reason, Severity

_OF_NO_CONCERN = [
    float(reason) for reason in (Reason.AVAILABLE, Reason.STEP_SKIPPED, Reason.ONE_BATCH, Reason.RANK_GRADIENT_UNSEEN)
]
"""Reasons that hold for one step only, or for a reading that no rule needs."""


@rule(
    "X101", "probe-failed", reads=("monitor/probe_failed",), per_scope=True,
    explains=("X103",),
    message=Message("Part of the monitor failed and is switched off: {scope}"),
    remedies=(advise("report_bug", "Report bug", "the log of the training process has the traceback", scope_is="probe"),),
)  # fmt: skip
def probe_failed(failed: Panel) -> Iterator[Finding]:
    """Part of the measuring raised an error and is switched off.

    ## Why is this bad?
    Training goes on untouched, but what this part measures is missing from here on, and no rule that needs it can fire:
    silence no longer means health.

    ## Example
    fires: monitor/probe_failed{weights} 1
    quiet: monitor/probe_failed{weights} 0
    """
    for index in np.flatnonzero((failed.values > 0).any(axis=0)):  # recorded once, and still true later
        yield finding(Severity.WARNING, 1.0, NO_BOUND, failed.scopes[index])


@rule(
    "X102", "rule-failed", reads=("monitor/rule_failed",), per_scope=True,
    message=Message("The rule {scope} failed and is switched off"),
    remedies=(
        advise("report_bug", "Report bug", "the log of the training process has the traceback", scope_is="rule"),
        advise("disable_rule", "Disable rule", "Config(disable=...) leaves it out, live and in every check", scope_is="rule"),
    ),
)  # fmt: skip
def rule_failed(failed: Panel) -> Iterator[Finding]:
    """Rule that raised an error and is switched off.

    ## Why is this bad?
    Training goes on untouched, but what this rule looks for is no longer looked for. The finding is made at the step
    where it happened; its scope is the name of the rule.

    ## Example
    fires: monitor/rule_failed{loss-spike} 1
    quiet: monitor/rule_failed{loss-spike} 0
    """
    for index in np.flatnonzero(failed.last > 0):
        yield finding(Severity.WARNING, 1.0, NO_BOUND, failed.scopes[index])


@rule(
    "X103", "unavailable", reads=("monitor/unavailable",), per_scope=True, keep=1,
    message=Message("{scope} cannot be measured", "", "{reason}"),
    remedies=(
        advise("tell_the_monitor", "Tell the monitor", "what it cannot see from its hooks, an argument of watch() can tell it: scaler, the "
               "module that is really called, or monitor.clip_grad_norm_ in the loop", scope_is="metric"),
    ),
)  # fmt: skip
def unavailable(reasons: Panel) -> Iterator[Finding]:
    """Reading that cannot be taken in this run.

    ## Why is this bad?
    It is not: the monitor leaves a number out rather than give a wrong one. But the rules that need it stay silent, and
    the evidence says why. A step that a gradient scaler skips has no readings for that step only, and is not reported;
    nor is a gradient noise scale for which a step has too few batches: no rule needs it.

    ## Example
    fires: monitor/unavailable{gradient/global_norm} 3
    quiet: monitor/unavailable{gradient/global_norm} 0 2 0
    """
    for index in np.flatnonzero(np.isfinite(reasons.last) & ~np.isin(reasons.last, _OF_NO_CONCERN)):
        reason = int(reasons.last[index])
        is_known = reason in Reason._value2member_map_
        words = str(Reason(reason)) if is_known else "unknown"
        yield finding(Severity.INFO, reason, NO_BOUND, reasons.scopes[index], reason=words)


@rule(
    "X104", "store-failed", reads=("monitor/store_failed",),
    message=Message("The run is no longer being stored", "", "the run directory can no longer be written"),
    remedies=(
        advise("free_the_disk", "Free the disk", "df -h and the permissions of the run directory show whether it is full or read-only"),
        advise("resume_recording", "Resume recording", "watch(run=..., resume=True) goes on with the same run directory"),
    ),
)  # fmt: skip
def store_failed(failed: Series) -> Finding | None:
    """Recording has stopped: the run directory can no longer be written.

    ## Why is this bad?
    Training and judging go on, and alerts still reach the console, but nothing is stored from this step on: a later
    check, report or comparison ends here. The disk is full or read-only, or the directory is gone.

    ## Example
    fires: 1
    quiet: 0
    """
    return finding(Severity.WARNING, 1.0, NO_BOUND) if failed.last > 0 else None
