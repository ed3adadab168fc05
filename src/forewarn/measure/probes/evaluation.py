"""The losses passed to `monitor.end_epoch`, and what follows from them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from forewarn.measure.engine import Value
from forewarn.measure.probe import ONE, Array, Pending, Probe, Reading
from forewarn.measure.probes.loss import EpochLoss, as_scalar
from forewarn.measure.step import Step
from forewarn.types import Reason, gap, improvement


class EvaluationProbe(Probe):
    """`evaluation/…` and `eval/loss` at the end of each epoch.

    The training loss defaults to the mean of the losses given to `monitor.step` since the last epoch ended.
    """

    name = "evaluation"
    needs: Mapping[type, Sequence[str]] = {EpochLoss: ()}

    def __init__(self) -> None:
        self._epoch = 0
        self._validation = math.nan
        """The latest finite validation loss."""
        self._losses: dict[str, Value] | None = None

    def give(self, train_loss: Any, val_loss: Any) -> None:
        """Store the losses of the epoch that ends now."""
        both = {"train_loss": train_loss, "val_loss": val_loss}
        self._losses = {name: as_scalar(name, value) for name, value in both.items() if value is not None}

    def collect(self, step: Step) -> Pending | None:
        losses, self._losses = self._losses, None
        if losses is None:
            return None

        def decode(arrays: Sequence[Array]) -> Iterator[Reading]:
            values = {name: float(np.float32(array)) for name, array in zip(losses, arrays, strict=True)}  # as stored
            values = {"train_loss": math.nan, "val_loss": math.nan, **values}
            epoch_loss = step.get(EpochLoss)
            readings = self._readings(values["train_loss"], values["val_loss"], epoch_loss)
            if epoch_loss is None:  # not in `needs`: needed only at an epoch's end without a passed loss
                for metric in ("evaluation/train_loss", "evaluation/end_loss"):
                    if math.isnan(readings.get(metric, math.nan)):
                        step.unavailable(metric, Reason.PROVIDER_FAILED)
            for name, value in readings.items():
                if not math.isnan(value):
                    yield Reading(name, ONE, value)

        return Pending(list(losses.values()), decode)

    def _readings(self, train: float, validation: float, epoch_loss: EpochLoss | None) -> dict[str, float]:
        """All readings of the epoch that ended."""
        train = epoch_loss.mean if math.isnan(train) and epoch_loss is not None else train
        before = self._validation
        if math.isfinite(validation):
            self._validation = validation
        self._epoch += 1
        readings = {
            "evaluation/epoch": float(self._epoch),
            "evaluation/train_loss": train,
            "eval/loss": validation,
            "evaluation/improvement_rate": improvement(before, validation),
            "evaluation/train_val_gap": gap(train, validation),
        }
        if epoch_loss is not None and math.isfinite(epoch_loss.end):
            readings |= {
                "evaluation/start_loss": epoch_loss.start,
                "evaluation/end_loss": epoch_loss.end,
                "evaluation/peak_loss": epoch_loss.peak,
            }
        return readings

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "validation": [self._validation]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._epoch = int(state["epoch"])
        self._validation = float([math.nan, *state["validation"]][-1])
