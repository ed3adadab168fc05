"""Accelerate: `watch(accelerator, model, optimizer)`, for a loop that calls `accelerator.backward`."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from forewarn import attach
from forewarn.measure.probes.loss import as_scalar
from forewarn.measure.probes.speed import COUNTED
from forewarn.monitor import Monitor
from forewarn.types import Outcome

try:
    from accelerate import Accelerator
except ImportError as missing:
    raise ImportError(
        "forewarn.integrations.accelerate needs accelerate: pip install 'forewarn[accelerate]'"
    ) from missing

_log = logging.getLogger("forewarn")

Models = nn.Module | Mapping[str, nn.Module]
"""A model, or several by name."""


def watch(
    accelerator: Accelerator,
    model: Models,
    optimizer: Any,
    run: str | Path | None = None,
    **options: Any,
) -> AcceleratedMonitor:
    """Attach a monitor to what `accelerator.prepare` returned; call its `step(loss)` after every `optimizer.step()`.

    All other arguments are those of `forewarn.watch`. The gradient scaler is found, and so is the limit that
    `accelerator.clip_grad_norm_` clips to.
    """
    if not isinstance(accelerator, Accelerator):
        raise TypeError(
            f"accelerator must be an accelerate.Accelerator, not {type(accelerator).__name__}; "
            "call watch(accelerator, model, optimizer)"
        )
    options.setdefault("scaler", accelerator.scaler)
    return AcceleratedMonitor(accelerator, attach.watch(model, optimizer, run, **options), model)


class AcceleratedMonitor:
    """A `forewarn.Monitor` whose `step` may be called after every micro-batch. All else is the monitor's own.

    `accelerator.end_training()` closes it too.
    """

    def __init__(self, accelerator: Accelerator, monitor: Monitor, model: Models) -> None:
        self._accelerator = accelerator
        self._monitor = monitor
        self._losses: list[Tensor | float] = []
        """The losses of the micro-batches since the last step."""
        self._counts: dict[str, Any] = {}
        """Their numbers of tokens and samples."""
        self._undo = [
            report_clipping(accelerator, monitor, model),
            replace_method(accelerator, "end_training", self._closing(accelerator.end_training)),
            replace_method(accelerator, "save_state", paused(monitor, "checkpoint", accelerator.save_state)),
        ]

    def step(self, loss: Tensor | float | None = None, **extra: Tensor | float) -> Outcome:
        """Complete one optimizer step; while gradients accumulate, only keep the loss.

        The step's loss is the mean over its micro-batches.
        """
        if loss is not None:
            self._losses.append(loss.detach() if isinstance(loss, Tensor) else loss)
        for name in COUNTED:
            if name in extra:
                self._counts[name] = self._counts.get(name, 0) + extra[name]
        if not self._accelerator.sync_gradients:
            return Outcome()
        losses, self._losses = self._losses, []
        counts, self._counts = self._counts, {}
        extra |= counts
        return self._monitor.step(_mean(losses) if len(losses) > 1 else next(iter(losses), None), **extra)

    def close(self, reason: str = "completed") -> None:
        """Give the accelerator its own methods back, and close the monitor."""
        for undo in self._undo:
            undo()
        self._monitor.close(reason)

    def _closing(self, end_training: Callable[[], None]) -> Callable[[], None]:
        @functools.wraps(end_training)
        def close_and_end_training() -> None:
            self.close()
            end_training()

        return close_and_end_training

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close("completed" if kind is None else f"{kind.__name__}: {error}".rstrip(": "))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # also while a copy has no monitor yet
            raise AttributeError(name)
        return getattr(self._monitor, name)


def _mean(losses: Sequence[Tensor | float]) -> Tensor | float:
    try:
        return torch.stack([torch.as_tensor(as_scalar("loss", loss)).float() for loss in losses]).mean()
    except (TypeError, ValueError):
        return losses[-1]  # the monitor says what is wrong with it


def report_clipping(accelerator: Any, monitor: Monitor, model: Models) -> Callable[[], None]:
    """Report to the monitor what `accelerator.clip_grad_norm_` does; returns a function that undoes this."""
    clip = accelerator.clip_grad_norm_
    models = list(model.values()) if isinstance(model, Mapping) else [model]

    @functools.wraps(clip)
    def clip_grad_norm_(parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        parameters = parameters if isinstance(parameters, Tensor) else list(parameters)
        norm = clip(parameters, max_norm, norm_type=norm_type)
        try:
            if norm is not None and norm_type == 2 and math.isfinite(max_norm) and _are_all(parameters, models):
                monitor.clipped(norm, max_norm)
        except Exception as error:  # the training goes on; the limit is then found from two measured steps
            _log.warning("clipping was not reported to the monitor: %s", error)
        return norm

    return replace_method(accelerator, "clip_grad_norm_", clip_grad_norm_)


def _are_all(parameters: Iterable[nn.Parameter], models: Sequence[nn.Module]) -> bool:
    """Whether these are all parameters of the models that are trained: only then their norm is the global one."""
    given = {id(parameter) for parameter in parameters if parameter.requires_grad}
    return given == {id(one) for model in models for one in model.parameters() if one.requires_grad}


def paused(monitor: Monitor, kind: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """The method, as a pause of the training."""

    @functools.wraps(method)
    def pausing(*args: Any, **kwargs: Any) -> Any:
        with monitor.pause(kind):
            return method(*args, **kwargs)

    return pausing


def replace_method(owner: Any, name: str, replacement: Callable[..., Any]) -> Callable[[], None]:
    """Replace a method of one object; returns a function that puts the earlier one back, once."""
    earlier = vars(owner).get(name)
    setattr(owner, name, replacement)

    def undo() -> None:
        if vars(owner).get(name) is not replacement:
            return  # done already, or somebody else has replaced it since
        if earlier is None:
            delattr(owner, name)
        else:
            setattr(owner, name, earlier)

    return undo
