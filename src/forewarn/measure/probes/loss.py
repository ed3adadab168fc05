"""The training loss and its moving average."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forewarn.catalogue import Catalogue
from forewarn.measure.engine import Value, number_of
from forewarn.measure.loss_course import LossCourse
from forewarn.measure.loss_graph import LossGraph, loss_graph
from forewarn.measure.over_ranks import How, Part
from forewarn.measure.probe import ONE, Array, Pending, Probe, Reading
from forewarn.measure.step import Step
from forewarn.metrics import BUILT_IN
from forewarn.types import is_metric_name


@dataclass(frozen=True, slots=True)
class EpochLoss:
    """The course of the training loss in the epoch that ended; NaN where there were too few losses."""

    mean: float
    start: float
    """The loss at the start of the run."""
    end: float
    peak: float


class LossProbe(Probe):
    """`train/loss`, its moving average, its level every 32 steps, and all other values passed to `monitor.step`.

    On measured steps also `train/applied_twice` and `train/paired_outputs`, from the graph of the loss.
    """

    name = "loss"
    on_every_rank = True
    provides = (EpochLoss, LossGraph)

    def __init__(self, decay: float | None) -> None:
        self.course = LossCourse(decay)
        self._extra: dict[str, Value] = {}
        self._root: Any = None
        """The `grad_fn` of the loss."""

    def give(self, loss: Any, extra: dict[str, Any]) -> None:
        """Keep the loss and further values of the step that ends now."""
        self._extra = {"loss": as_scalar("loss", loss)} if loss is not None else {}
        self._root = loss.grad_fn if isinstance(loss, Tensor) else None
        for name, value in extra.items():  # a bad one must not cost the loss
            check_name(f"train/{name}")
            self._extra[name] = as_scalar(name, value)

    def collect(self, step: Step) -> Pending | None:
        if step.ends_epoch:
            return Pending(decode=lambda _: self._end_epoch(step))
        values, self._extra = self._extra, {}
        root, self._root = self._root, None
        graph = loss_graph(root) if step.measured and root is not None else None
        if graph is not None:
            step.provide(graph)
        if not values:
            return Pending(decode=lambda _: self._of_the_last_stage(step))

        def decode(arrays: Sequence[Array]) -> list[Reading]:
            readings = []
            for name, value in zip(values, arrays, strict=True):
                number = float(value)
                readings.append(Reading(_metric(name), ONE, number))
                if name == "loss":
                    readings += self._course_of(number)
            if graph is not None:
                readings.append(Reading("train/applied_twice", ONE, ("", "softmax", "sigmoid").index(graph.twice)))
                readings.append(Reading("train/paired_outputs", ONE, graph.num_paired))
            return readings

        return Pending(list(values.values()), decode, list(map(_part, values)))

    def _course_of(self, loss: float) -> list[Reading]:
        as_stored = array("f", (loss,))[0]
        return [Reading(metric, ONE, reading) for metric, reading in self.course.add(as_stored).items()]

    def _of_the_last_stage(self, step: Step) -> Iterator[Reading]:
        """In a pipeline, only the last stage knows the loss."""
        for loss in step.with_other_stages("train/loss", np.zeros(0)):
            yield Reading("train/loss", ONE, loss)
            yield from self._course_of(loss)

    def _end_epoch(self, step: Step) -> Sequence[Reading]:
        course = self.course
        step.provide(EpochLoss(course.mean, course.start, course.end, course.peak))
        course.begin_epoch()
        return ()

    def state_dict(self) -> dict[str, Any]:
        return self.course.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.course.load_state_dict(state)


@lru_cache(maxsize=256)
def _metric(name: str) -> str:
    return f"train/{name}"


@lru_cache(maxsize=256)
def _part(name: str) -> Part:
    return Part(How.MEAN, name, each=name == "loss")


def check_name(name: Any, catalogue: Catalogue = BUILT_IN) -> None:
    """Refuse an invalid metric name, or one that a probe already records."""
    if not isinstance(name, str) or not is_metric_name(name):
        raise ValueError(f"a metric is named family/quantity, such as 'eval/accuracy', not {name!r}")
    if catalogue.is_reserved(name):
        quantity = name.partition("/")[2]
        free = next(own for family in ("my", "logged") if not catalogue.is_reserved(own := f"{family}/{quantity}"))
        who = "the monitor" if BUILT_IN.is_reserved(name) else "one of your probes"
        raise ValueError(f"{who} already records {name!r}; log yours under another family, such as {free!r}")


TAKE_A_PART = "record its abs(), its real or its imag part"
"""What to do with a complex number."""


def as_scalar(name: str, value: Any) -> Value:
    """One number, left on its device without waiting for it; on the host it is read at once."""
    if type(value) is float:
        return value
    if isinstance(value, Tensor):
        if (number := number_of(value)) is not None:
            return number
        if value.numel() != 1:
            raise ValueError(
                f"{name} must be one number, but it is a tensor of shape {tuple(value.shape)}; pass its mean()"
            )
        if value.is_complex():
            raise TypeError(f"{name} must be a real number, but it is a tensor of {value.dtype}; {TAKE_A_PART}")
        if value.dtype is torch.bool:
            raise TypeError(f"{name} must be a real number, but it is a tensor of {value.dtype}; take its float()")
        alone = value.detach()
        return alone if alone.dim() == 0 else alone.reshape(())
    if np.iscomplexobj(value):  # float() would drop the imaginary part of a numpy number
        raise TypeError(f"{name} must be a real number, but it is {value!r}; {TAKE_A_PART}")
    try:
        if isinstance(value, str):
            raise TypeError
        return float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be a number or a tensor of one element, not {value!r}") from None
