"""Rules about the monitor itself: they report what it could not do."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from forewarn.judge.headlines import Message
from forewarn.judge.registry import NO_BOUND, finding, rule
from forewarn.judge.remedies import advise, for_cause
from forewarn.judge.series import Panel, Series
from forewarn.types import Finding, Reason, RunInfo, Severity

_OF_NO_CONCERN = [
    float(reason) for reason in (Reason.AVAILABLE, Reason.STEP_SKIPPED, Reason.ONE_BATCH, Reason.RANK_GRADIENT_UNSEEN)
]
"""Reasons that apply to a single step, or to a reading that no rule needs."""


_ADVISED = (
    Reason.SCALED_GRADIENTS, Reason.NO_FORWARD_SEEN, Reason.NO_BACKWARD_SEEN, Reason.AFTER_CLIPPING, Reason.COMPILED,
    Reason.EVALUATION_MODE, Reason.REENTRANT_CHECKPOINT,
)  # fmt: skip
"""Reasons that a person can do something about."""


@rule(
    "X101", "probe-failed", reads=("monitor/probe_failed",), per_scope=True,
    explains=("X103",),
    message=Message("The probe {scope} failed and is switched off"),
    remedies=(
        advise("report_bug", "Find the traceback in the training log and report it",
               "what this probe measures is missing until it is fixed", scope_is="probe"),
    ),
)  # fmt: skip
def probe_failed(failed: Panel) -> Iterator[Finding]:
    """A probe raised an error and is switched off.

    ## Why is this bad?
    Training continues unaffected, but the readings of this probe are missing from here on. Rules that need them can no
    longer fire, so silence no longer means that the run is healthy.

    ## Example
    fires: monitor/probe_failed{weights} 1
    quiet: monitor/probe_failed{weights} 0
    """
    for index in np.flatnonzero((failed.values > 0).any(axis=0)):  # recorded once, and true from then on
        yield finding(Severity.WARNING, 1.0, NO_BOUND, failed.scopes[index])


@rule(
    "X102", "rule-failed", reads=("monitor/rule_failed",), per_scope=True,
    message=Message("The rule {scope} failed and is switched off"),
    remedies=(
        advise("report_bug", "Find the traceback in the training log and report it",
               "nothing looks for this problem until it is fixed", scope_is="rule"),
        advise("disable_rule", "Turn {scope} off with Config(disable=...)",
               "it is then left out of live runs and of every check", scope_is="rule"),
    ),
)  # fmt: skip
def rule_failed(failed: Panel) -> Iterator[Finding]:
    """A rule raised an error and is switched off.

    ## Why is this bad?
    Training continues unaffected, but nothing looks for this problem any more. The step is the one at which the rule
    failed, and the scope is its name.

    ## Example
    fires: monitor/rule_failed{loss-spike} 1
    quiet: monitor/rule_failed{loss-spike} 0
    """
    for index in np.flatnonzero(failed.last > 0):
        yield finding(Severity.WARNING, 1.0, NO_BOUND, failed.scopes[index])


@rule(
    "X103", "unavailable", reads=("monitor/unavailable",), per_scope=True, keep=1,
    message=Message("Cannot measure {scope}", "", "{reason}"),
    remedies=(
        for_cause(Reason.SCALED_GRADIENTS, advise(
            "pass_the_scaler", "Pass the gradient scaler: `watch(..., scaler=scaler)`",
            "the monitor then divides the gradients by its scale", scope_is="metric",
        )),
        *(
            for_cause(reason, advise(
                "watch_what_is_called", "Pass the module that your loop calls to `watch`",
                "its hooks see only the passes that go through it", scope_is="metric",
            ))
            for reason in (Reason.NO_FORWARD_SEEN, Reason.NO_BACKWARD_SEEN)
        ),
        for_cause(Reason.AFTER_CLIPPING, advise(
            "clip_with_the_monitor", "Clip with `monitor.clip_grad_norm_`",
            "it reads the norm before it clips", scope_is="metric",
        )),
        for_cause(Reason.COMPILED, advise(
            "compile_later", "For a short run, leave out `torch.compile` to see {scope}",
            "hooks do not run inside compiled code", scope_is="metric",
        )),
        for_cause(Reason.EVALUATION_MODE, advise(
            "call_train", "Call `model.train()` before the training step",
            "layers are read in training mode only", scope_is="metric",
        )),
        for_cause(Reason.REENTRANT_CHECKPOINT, advise(
            "checkpoint_without_reentry", "Use `checkpoint(..., use_reentrant=False)`",
            "re-entrant checkpointing allows no extra backward pass", scope_is="metric",
        )),
        for_cause("other", advise(
            "do_without", "Nothing needs to be done if you can do without {scope}",
            "training is not affected; only the rules that need it stay silent", scope_is="metric",
        )),
    ),
)  # fmt: skip
def unavailable(reasons: Panel) -> Iterator[Finding]:
    """A metric cannot be measured in this run.

    ## Why is this bad?
    It is not a fault of the run: the monitor leaves a number out rather than record a wrong one. But rules that need
    it cannot fire, and the evidence says why. A step skipped by a gradient scaler is not reported, since only that step
    has no readings. Neither is a gradient noise scale without enough batches per step, since no rule needs it.

    ## Example
    fires: monitor/unavailable{gradient/global_norm} 3
    quiet: monitor/unavailable{gradient/global_norm} 0 2 0
    """
    for index in np.flatnonzero(np.isfinite(reasons.last) & ~np.isin(reasons.last, _OF_NO_CONCERN)):
        reason = int(reasons.last[index])
        is_known = reason in Reason._value2member_map_
        words = str(Reason(reason)) if is_known else "unknown"
        cause = Reason(reason).name.lower() if reason in _ADVISED else "other"
        yield finding(Severity.INFO, reason, NO_BOUND, reasons.scopes[index], reason=words, cause=cause)


@rule(
    "X104", "store-failed", reads=("monitor/store_failed",), keep=1,
    message=Message("The run is not being stored", "", "the run directory cannot be written"),
    remedies=(
        advise("free_the_disk", "Check disk space and permissions of the run directory",
               "`df -h` and `df -i` show whether the disk is full, and recording continues once it has room"),
        advise("resume_recording", "Resume with watch(run=..., resume=True)",
               "it continues in the same run directory"),
    ),
)  # fmt: skip
def store_failed(failed: Series) -> Finding | None:
    """The run directory cannot be written.

    ## Why is this bad?
    Training continues and alerts still reach the console, but a later check, report or comparison ends here. The disk
    is full, out of inodes, read-only or not mounted, or the directory is gone. The monitor tries again every few
    seconds, also at the start of a run. Readings wait in memory, up to 64 MB, and are stored once that works. Those
    that do not fit, or still wait when the process ends, are lost.

    ## Example
    fires: 1
    quiet: 0
    """
    return finding(Severity.WARNING, 1.0, NO_BOUND) if failed.last > 0 else None


@rule(
    "X106", "detail-over-budget", reads=("monitor/detail_interval",), keep=1,
    message=Message(
        "Detail is measured every {value} steps, to save time", "planned every {bound} · budget {budget:%}"
    ),
    remedies=(
        advise("measure_less", "Switch off what you do not look at with Measure(...)",
               "`Measure(activations=False)` often saves most; docs/overhead.md has the cost of every family"),
        advise("raise_budget", "Raise watch(budget=...)", "the planned interval is kept as long as the budget allows"),
    ),
)  # fmt: skip
def detail_over_budget(interval: Series, info: RunInfo) -> Finding | None:
    """Measuring in detail takes more time than `watch(budget=…)` allows, so it is done less often.

    ## Why is this bad?
    The run keeps its speed, and what is read on every step stays: loss, learning rate, gradient norm and time. But
    rules about single tensors and layers need several detailed measurements, so they take longer to fire. The first
    steps and those after a warning are still measured in detail.

    ## Example
    fires: 500
    quiet: 1
    """
    if not interval.last > info.every:
        return None
    return finding(Severity.INFO, interval.last, float(info.every), budget=info.budget)


@rule(
    "X107", "notify-failed", reads=("monitor/notify_failed",), keep=1,
    message=Message("Notifications are not delivered"),
    remedies=(
        advise("test_the_service", "Send a sample with forewarn notify --test URL",
               "it shows whether the address and the token are right and this machine reaches the service"),
        advise("read_the_log", "Find the name of the service in the training log",
               "the warning there says which service failed; its URL is never written"),
    ),
)  # fmt: skip
def notify_failed(failed: Series) -> Finding | None:
    """A service did not take a notification, although it was tried several times.

    ## Why is this bad?
    Training continues and the run is stored as usual, but whoever relies on messages is not told about alerts. The
    service is down, the token has expired, or this machine has no way to the internet. Each later alert is tried again.

    ## Example
    fires: 1
    quiet: 0
    """
    return finding(Severity.WARNING, 1.0, NO_BOUND) if failed.last > 0 else None


@rule(
    "X108", "snapshot-failed", reads=("monitor/snapshot_failed",), keep=1,
    message=Message("Debug snapshots cannot be written"),
    remedies=(
        advise("free_the_disk", "Check disk space and permissions of the run directory",
               "the warning in the training log says why the snapshot was not written"),
        advise("save_less", "Save less with Snapshots(weights=..., keep_batches=...)",
               "weights and batches are most of a snapshot, and Snapshots(automatic=False) writes none by itself"),
    ),
)  # fmt: skip
def snapshot_failed(failed: Series) -> Finding | None:
    """A debug snapshot could not be written.

    ## Why is this bad?
    Training continues and the run is stored as usual, but the batch and the state of the step that went wrong are lost,
    so `forewarn replay` cannot run it again. The disk is full or the run directory cannot be written. No further
    snapshot is written by itself; `monitor.snapshot()` tries again.

    ## Example
    fires: 1
    quiet: 0
    """
    return finding(Severity.WARNING, 1.0, NO_BOUND) if failed.last > 0 else None


@rule(
    "X109", "tracker-failed", reads=("monitor/tracker_failed",), keep=1,
    message=Message("A tracker does not get all readings"),
    remedies=(
        advise("read_the_log", "Find the name of the tracker and its error in the training log",
               "the warning there says whether it is down, refuses the readings or is only slow"),
        advise("send_less", "Send only aggregates, or check the connection to the tracker",
               "with detail='full', thousands of readings are sent on every measured step"),
    ),
)  # fmt: skip
def tracker_failed(failed: Series) -> Finding | None:
    """W&B, MLflow or trackio does not take all readings that forewarn sends.

    ## Why is this bad?
    Training continues and the run directory holds everything, but the charts in the tracker have gaps and may lack
    alerts. Either its server cannot be reached or refuses the readings, or it is slower than the training: readings
    wait in memory, and the oldest are left out after 1,000 steps.

    ## Example
    fires: 1
    quiet: 0
    """
    return finding(Severity.WARNING, 1.0, NO_BOUND) if failed.last > 0 else None
