"""The training loss and its moving average."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forewarn.ema import Ema
from forewarn.probes.probe import ONE, Array, Pending, Probe, Reading


class LossProbe(Probe):
    """`train/loss`, its moving average `train/loss_ema`, and whatever else `monitor.step` is given."""

    name = "loss"

    def __init__(self, decay: float | None) -> None:
        self._ema = None if decay is None else Ema(decay)
        self._extra: dict[str, Tensor] = {}

    def give(self, loss: Any, extra: dict[str, Any]) -> None:
        """Take the loss and further values of the step that ends now."""
        self._extra = {"loss": as_scalar("loss", loss)} if loss is not None else {}
        self._extra |= {name: as_scalar(name, value) for name, value in extra.items()}

    def collect(self, measured: bool) -> Pending | None:
        given, self._extra = self._extra, {}
        if not given:
            return None

        def decode(arrays: Sequence[Array]) -> Iterator[Reading]:
            for name, value in zip(given, arrays, strict=True):
                yield Reading(f"train/{name}", ONE, value)
                if name == "loss" and self._ema is not None:
                    as_stored = float(np.float32(value))
                    yield Reading("train/loss_ema", ONE, self._ema.update(as_stored))

        return Pending(list(given.values()), decode)

    def state_dict(self) -> dict[str, Any]:
        return {} if self._ema is None else {"ema": self._ema.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._ema is not None and "ema" in state:
            self._ema.value = float(state["ema"])


def as_scalar(name: str, value: Any) -> Tensor:
    """One number as a tensor on the device where it already is; it is never waited for."""
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(
                f"{name} must be one number, but it is a tensor of shape {tuple(value.shape)}; pass its mean()"
            )
        if value.is_complex() or value.dtype is torch.bool:
            raise TypeError(f"{name} must be a real number, but it is a tensor of {value.dtype}")
        return value.detach().reshape(())
    try:
        return torch.tensor(float(value), dtype=torch.float64)
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be a number or a tensor of one element, not {value!r}") from None
