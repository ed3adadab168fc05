"""Gradient statistics of any model as plain functions, and a gradient monitor for any loop."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
from torch import Tensor, nn

from forewarn.judge.gradient_tally import (
    EXPLODING,
    VANISHING,
    GradientSummary,
    GradientTally,
    also_named,
    balance_in_words,
    layers_in_words,
)
from forewarn.measure.engine import COLUMNS, measure, summarize
from forewarn.measure.parameters import ParameterIndex
from forewarn.measure.probe import Array
from forewarn.measure.probes.tasks import Shared, TaskProbe
from forewarn.measure.transfer import on_host, rows_on_host
from forewarn.types import Reason, in_words


def compute_gradient_statistics(model: nn.Module) -> dict[str, float]:
    """All gradients of a model together: norm, mean, std, min and max of their values, and the spread over layers.

    `num_nonfinite` values are left out of the others; everything is NaN where no parameter has a gradient.
    """
    rows = _rows(model)[1]
    if not len(rows):
        rows = np.full((1, len(COLUMNS)), np.nan)
    norms = summarize(rows)["norm"]
    total = rows.sum(axis=0)
    least, most = COLUMNS.index("min"), COLUMNS.index("max")
    total[least], total[most] = rows[:, least].min(), rows[:, most].max()
    together = {name: float(value[0]) for name, value in summarize(total[None]).items()}
    return {
        "num_layers": int(np.isfinite(norms).sum()),
        "global_norm": together["norm"],
        **{name: together[name] for name in ("mean", "std", "min", "max", "zero_fraction")},
        "num_nonfinite": together["nonfinite"],
        "mean_norm": float(norms.mean()),
        "std_norm": float(norms.std()),
        "min_norm": float(norms.min()),
        "max_norm": float(norms.max()),
    }


def compute_layer_gradient_norms(model: nn.Module) -> dict[str, float]:
    """The norm of every gradient by parameter name; NaN if it has a non-finite value."""
    names, rows = _rows(model)
    quantities = summarize(rows)
    norms = np.where(quantities["nonfinite"] > 0, np.nan, quantities["norm"])
    return dict(zip(names, map(float, norms), strict=True))


@also_named(task1_loss="loss_a", task2_loss="loss_b")
def compute_task_gradient_ratio(loss_a: Tensor, loss_b: Tensor, model: nn.Module, *, shared: Shared = None) -> float:
    """The gradient norm of one loss over that of another, on the last layer that both reach, or on `shared`.

    Call it before `backward()`: the graph is kept and `.grad` is not touched. Waits for the result. The losses may be
    called `task1_loss` and `task2_loss`.
    """
    losses = {"a": loss_a, "b": loss_b}
    probe = TaskProbe(ParameterIndex(model, []), None)
    probe.look(losses)
    probe.share(shared, losses)
    norms = probe.compare(losses, {"a": 1.0, "b": 1.0})
    if norms is None:
        reason = Reason.NO_SHARED_LAYER if probe.reason is Reason.AVAILABLE else probe.reason
        raise ValueError(f"the gradients of the two losses cannot be compared: {reason}")
    first, second = on_host(norms)
    return float(first / second) if second > 0 else math.inf if first > 0 else math.nan


class GradientMonitor:
    """Follows the gradients of a model in any loop: `update` after `backward()`, `get_summary` at the end.

    It measures on every `log_frequency`-th epoch and waits for the result. To watch a whole run without waiting, use
    `forewarn.watch`. With `verbose` it passes a line to `show` each time. If you count something other than epochs,
    such as steps, name it in `unit`. `log_frequency` may be called `log_freq`.
    """

    @also_named(log_freq="log_frequency")
    def __init__(
        self,
        log_frequency: int = 10,
        vanishing_threshold: float = VANISHING,
        exploding_threshold: float = EXPLODING,
        verbose: bool = False,
        unit: str = "epoch",
        show: Callable[[str], object] = print,
    ) -> None:
        if log_frequency < 1:
            raise ValueError(f"log_frequency must be at least 1, not {log_frequency!r}")
        self._every = log_frequency
        self._tally = GradientTally(vanishing_threshold, exploding_threshold, unit)
        self._show = show if verbose else None

    def update(self, epoch: int, model: nn.Module, task_ratio: float | None = None) -> dict[str, float] | None:
        """Measure the gradients after `backward()`; returns statistics, or None on an epoch that is not measured.

        `task_ratio`, from `compute_task_gradient_ratio`, is counted on every call.
        """
        if task_ratio is not None:
            self._tally.add_ratio(task_ratio)
        if epoch % self._every:
            return None
        statistics = compute_gradient_statistics(model)
        self._tally.add_norm(epoch, statistics["global_norm"])
        norms = compute_layer_gradient_norms(model)
        self._tally.add_layers(norms)
        if self._show is not None:
            line = f"{self._tally.unit} {epoch}: gradient norm {in_words(statistics['global_norm'])}"
            line += f" | {layers_in_words(norms)}"
            if task_ratio is not None:
                line += f" | task ratio {in_words(task_ratio)} ({balance_in_words(task_ratio)})"
            self._show(line)
        return statistics

    def get_summary(self) -> GradientSummary:
        """Mean ± std and peak of the norm, the same of layers, those that vanished or exploded, and the task balance.

        It prints as text.
        """
        return self._tally.summary()

    def state_dict(self) -> dict[str, Any]:
        """What has been added up so far, as plain values."""
        return asdict(self._tally)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._tally = GradientTally(**state)


def _rows(model: nn.Module) -> tuple[tuple[str, ...], Array]:
    """The parameters that have a gradient, and the engine's row of each; one transfer to the host."""
    parameter_index = ParameterIndex(model, [])
    pairs = zip(parameter_index.names, parameter_index.gradients, strict=True)
    gradients = {name: gradient for name, gradient in pairs if gradient is not None}
    return tuple(gradients), rows_on_host(measure(list(gradients.values())))
