"""`torch_module_monitor.storage`: the metrics by step, and that package's way to fill them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forewarn.standalone.metric_storage import StorageManager as _StorageManager

__all__ = ["StorageManager"]


class StorageManager(_StorageManager):
    """`forewarn.StorageManager` that also collects several values per key and aggregates them at the end of a step."""

    def __init__(self, logger: logging.Logger | None = None) -> None:
        super().__init__(logger)
        self.logger = logger
        self.aggregation_fns: dict[str, Callable[..., Any]] = {}

    def log_scalar(self, step: int, key: str, value: Any, aggregation_fn: Callable[..., Any] | None = None) -> None:
        """Add one number; a key's second number in a step makes a list of them, until `aggregate_step`."""
        earlier: Any = self.get_step_metrics(step).get(key)
        super().log_scalar(step, key, value)
        if earlier is not None:
            collected: Any = earlier if isinstance(earlier, list) else [earlier]
            self.log_dict[step][key] = [*collected, self.log_dict[step][key]]  # type: ignore[assignment]
        self._aggregate_by(key, aggregation_fn)

    def log_tensor(self, step: int, key: str, tensor: Tensor, aggregation_fn: Callable[..., Any] | None = None) -> None:
        """Add the elements of a tensor to a key's, until `aggregate_step`."""
        metrics: dict[str, Any] = self.log_dict.setdefault(step, {})
        metrics.setdefault(key, []).append(tensor.detach().flatten())
        self._aggregate_by(key, aggregation_fn)

    def aggregate_step(self, step: int) -> None:
        """Replace each key's list by its mean, or by the result of its aggregation function.

        Where that is a dictionary, each entry is logged under the key with the entry's name appended.
        """
        metrics: dict[str, Any] = self.log_dict.get(step, {})
        for key, collected in list(metrics.items()):
            if not isinstance(collected, list):
                continue
            are_tensors = isinstance(collected[0], Tensor)
            values = torch.cat(collected) if are_tensors else collected
            default = _mean_element if are_tensors else np.mean
            aggregate = self.aggregation_fns.get(key, default)(values)
            del metrics[key]
            parts = aggregate.items() if isinstance(aggregate, dict) else [("", aggregate)]
            metrics.update({key + name: value for name, value in parts})

    def _aggregate_by(self, key: str, function: Callable[..., Any] | None) -> None:
        if function is not None:
            self.aggregation_fns[key] = function


def _mean_element(values: Tensor) -> float:
    return values.mean().item()
