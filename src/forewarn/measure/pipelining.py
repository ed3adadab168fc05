"""What torch's own pipelining does with a model, which its objects know and the model does not."""

from __future__ import annotations

import gc
import inspect
import sys
from collections.abc import Iterator
from typing import Any

from torch import nn

from forewarn.measure.module_tree import named_modules, unwrapped

_STAGE, _SCHEDULES = "torch.distributed.pipelining.stage", "torch.distributed.pipelining.schedules"

_REHEARSALS = ("_forward_metadata_inference", "_shape_inference")
"""Methods that run a stage on memory that nothing was written to, to learn the shapes of its outputs."""

_FRAMES_SEARCHED = 16
"""Maximum stack frames between such a method and our hook, including wrappers of the model."""


def stages_that_run(model: nn.Module) -> tuple[tuple[int, ...], int]:
    """The numbers of the stages that run this model or parts of it, and of how many; (), 0 if none do."""
    stages = list(_stages_of(model))
    numbers = {int(stage.stage_index) for stage in stages}
    return tuple(sorted(numbers)), max((int(stage.num_stages) for stage in stages), default=0)


def divisor_of_gradients(model: nn.Module) -> int:
    """What a schedule divides the gradients of this model by after its backward passes: 1, or the micro-batches."""
    stages = {id(stage) for stage in _stages_of(model)}
    divisors = [
        int(schedule._n_microbatches)
        for schedule in _held(_SCHEDULES, "_PipelineSchedule")
        if getattr(schedule, "scale_grads", False)
        and stages & {id(stage) for stage in (getattr(schedule, "_stage", None), *getattr(schedule, "_stages", ()))}
    ]
    return divisors[-1] if divisors else 1


def is_rehearsal() -> bool:
    """Whether the model is run only to learn the shapes of its outputs, on values that mean nothing."""
    if _STAGE not in sys.modules:
        return False
    frame = inspect.currentframe()
    for _ in range(_FRAMES_SEARCHED):
        frame = frame.f_back if frame is not None else None
        if frame is None:
            return False
        if frame.f_code.co_name in _REHEARSALS and frame.f_globals.get("__name__") == _STAGE:
            return True
    return False


def _stages_of(model: nn.Module) -> Iterator[Any]:
    inside: set[int] = set()
    for stage in _held(_STAGE, "_PipelineStageBase"):
        inside = inside or {id(module) for _, module in named_modules(model)}
        if id(unwrapped(stage.submod)) in inside:
            yield stage


def _held(module: str, name: str) -> Iterator[Any]:
    """Every object of a class that exists, in the order in which they were made; none if it was never imported."""
    kind = getattr(sys.modules.get(module), name, None)
    if kind is not None:
        yield from (held for held in gc.get_objects() if issubclass(type(held), kind))
