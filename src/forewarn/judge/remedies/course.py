"""Remedies that change the course of a run: skip a batch, save, roll back, stop, train longer."""

from __future__ import annotations

import math

from forewarn.judge.history import History
from forewarn.judge.remedies.prescription import STEPS, Prescription, advise, declared
from forewarn.types import Finding, Remedy, RunInfo

_EPOCHS = ("epochs", "num_epochs")


def skip_batch(why: str = "one bad batch must not move the weights") -> Prescription:
    """Skip the batch of the finding."""
    return advise("skip_batch", "Skip batch", why, safety="safe")


def snapshot(why: str = "the state at this step is what a search for the cause starts from") -> Prescription:
    """Save the model, the optimizer and the recent readings."""
    return advise("snapshot", "Snapshot", why, safety="safe")


def roll_back(why: str = "the weights from before it are still good") -> Prescription:
    """Return to the last checkpoint before the trouble began; None if it began with the run."""

    def prescribe(finding: Finding, history: History, info: RunInfo) -> Remedy | None:
        lasting = finding.evidence.get("lasting_steps", 1)
        began = finding.step - int(lasting) + 1 if isinstance(lasting, int | float) else finding.step
        return Remedy("roll_back", {"before_step": began}, why, safety="opt_in") if began > 0 else None

    return prescribe


def stop(why: str = "every further step is spent on a run that is lost") -> Prescription:
    """End the run."""
    return advise("stop", "Stop", why, safety="opt_in")


def stop_early(why: str = "the weights of the best evaluation are the best of this run") -> Prescription:
    """Stop, and use the weights of the best evaluation."""

    def prescribe(finding: Finding, history: History, info: RunInfo) -> Remedy:
        losses = history.series("eval/loss")
        evaluations = [(float(loss), int(step)) for loss, step in zip(losses.values, losses.steps, strict=True)]
        best = min((pair for pair in evaluations if math.isfinite(pair[0])), default=None)
        if best is None:
            return Remedy("stop_early", {"step": finding.step}, why)
        return Remedy("stop_early", {"best_step": best[1], "best_loss": best[0]}, why)

    return prescribe


def train_longer(why: str = "the loss still falls a little in every epoch") -> Prescription:
    """Twice the declared epochs or steps, else twice the steps so far."""

    def prescribe(finding: Finding, history: History, info: RunInfo) -> Remedy:
        epochs, steps = declared(info, *_EPOCHS), declared(info, *STEPS)
        unit, now = ("epochs", epochs) if not math.isnan(epochs) else ("steps", steps)
        now = finding.step + 1 if math.isnan(now) else now
        return Remedy("train_longer", {"from": now, "to": 2 * now, "in": unit}, why)

    return prescribe
