"""Remedies that change the course of a run: skip a batch, save, roll back, stop, train longer."""

from __future__ import annotations

import math

from forewarn.judge.headlines import filled
from forewarn.judge.history import History
from forewarn.judge.remedies.prescription import STEPS, Numbers, Prescription, advise, declared
from forewarn.types import Finding, Remedy, RunInfo

_EPOCHS = ("epochs", "num_epochs")


def skip_batch(why: str = "one bad batch should not move the weights") -> Prescription:
    """Skip the batch of the finding."""
    return advise("skip_batch", "Skip the batch at step {step}", why, safety="safe")


def snapshot(why: str = "it shows what the model and optimizer looked like when this happened") -> Prescription:
    """Save the model, the optimizer and the recent readings."""
    return advise("snapshot", "Save a snapshot for debugging", why, safety="safe")


def roll_back(why: str = "the weights were still good then") -> Prescription:
    """Return to the last checkpoint before the trouble began; None if it began with the run."""

    def prescribe(finding: Finding, history: History, info: RunInfo) -> Remedy | None:
        lasting = finding.evidence.get("lasting_steps", 1)
        began = finding.step - int(lasting) + 1 if isinstance(lasting, int | float) else finding.step
        if began <= 0:
            return None
        do = f"Restore a checkpoint from before step {began}"
        return Remedy("roll_back", {"before_step": began}, why, safety="opt_in", do=do)

    return prescribe


def stop(why: str = "more steps will not save this run") -> Prescription:
    """End the run."""
    return advise("stop", "Stop the run", why, safety="opt_in")


def stop_early(why: str = "these weights did best on the validation set") -> Prescription:
    """Stop, and use the weights of the best evaluation."""

    def prescribe(finding: Finding, history: History, info: RunInfo) -> Remedy:
        losses = history.series("eval/loss")
        evaluations = [(float(loss), int(step)) for loss, step in zip(losses.values, losses.steps, strict=True)]
        best = min((pair for pair in evaluations if math.isfinite(pair[0])), default=None)
        if best is None:
            return Remedy("stop_early", {"step": finding.step}, why, do="Stop and use the best weights so far")
        numbers: Numbers = {"best_step": best[1], "best_loss": best[0]}
        do = filled("Stop and use the weights of step {best_step} (validation loss {best_loss})", numbers)
        return Remedy("stop_early", numbers, why, do=do)

    return prescribe


def train_longer(why: str = "the loss is still falling") -> Prescription:
    """Twice the declared epochs or steps, else twice the steps so far."""

    def prescribe(finding: Finding, history: History, info: RunInfo) -> Remedy:
        epochs, steps = declared(info, *_EPOCHS), declared(info, *STEPS)
        unit, now = ("epochs", epochs) if not math.isnan(epochs) else ("steps", steps)
        now = finding.step + 1 if math.isnan(now) else now
        numbers: Numbers = {"from": now, "to": 2 * now, "in": unit}
        return Remedy("train_longer", numbers, why, do=filled("Train for {to} {in} instead of {from}", numbers))

    return prescribe
