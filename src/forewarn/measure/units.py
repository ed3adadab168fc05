"""Dead and saturated units, followed over measured steps on the device that holds them.

On an accelerator only the share of such units is transferred to the host.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor


class DeadUnits:
    """For each unit of one layer, the number of measured steps and of positions since it last fired."""

    def __init__(self, num_units: int) -> None:
        self._idle: Any = np.zeros((2, num_units), np.int32)
        self._checks = 0
        self.num_units = num_units

    def update(self, fired: Any, sums: Any, positions: int) -> None:
        """Add one measured step: which units fired, and at how many positions each was read."""
        if isinstance(fired, Tensor):
            idle = torch.as_tensor(self._idle, device=fired.device)
            self._idle = torch.stack([idle[0] + 1, idle[1] + positions]).clamp_(max=_MOST).masked_fill_(fired, 0)
        else:
            self._idle = np.minimum(self._idle + np.array([[1], [positions]]), _MOST).astype(np.int32)
            self._idle[:, fired != 0] = 0
        self._checks += 1

    def share(self, window: int, least_positions: int) -> Any:
        """The share of units that were zero throughout the last `window` measured steps and `least_positions`.

        A number on the host or a tensor still on its device; NaN while fewer steps have been seen.
        """
        if self._checks < window:
            return float("nan")
        return _mean((self._idle[0] >= window) & (self._idle[1] >= least_positions))

    def state_dict(self) -> dict[str, Any]:
        return {"kind": "dead", "idle": _on_host(self._idle), "checks": self._checks}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._idle, self._checks = np.array(state["idle"], np.int32), int(state["checks"])


class SaturatedUnits:
    """For each unit of one layer, the share of positions at which it was within its range; recent steps count most."""

    def __init__(self, num_units: int) -> None:
        self._inside: Any = np.zeros(num_units)
        self._positions = 0.0
        self._seen = 0
        """All positions ever read; `_positions`, in contrast, decays as `_inside` does."""
        self._checks = 0
        self.num_units = num_units

    def update(self, fired: Any, sums: Any, positions: int) -> None:
        """Add one measured step: at how many positions each unit was within its range."""
        inside = torch.as_tensor(self._inside, device=sums.device) if isinstance(sums, Tensor) else self._inside
        self._inside = inside * _MEMORY + sums
        self._positions = self._positions * _MEMORY + positions
        self._seen += positions
        self._checks += 1

    def share(self, window: int, least_positions: int) -> Any:
        """The share of units that were almost never within their range; NaN while too few positions have been read."""
        if self._checks < window or self._seen < least_positions:
            return float("nan")
        return _mean(self._inside <= _STRAY * self._positions)

    def state_dict(self) -> dict[str, Any]:
        counts = {"positions": self._positions, "seen": self._seen, "checks": self._checks}
        return {"kind": "saturated", "inside": _on_host(self._inside), **counts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._inside, self._positions = np.array(state["inside"], np.float64), float(state["positions"])
        self._seen, self._checks = int(state["seen"]), int(state["checks"])


KINDS: dict[str, type[DeadUnits] | type[SaturatedUnits]] = {"dead": DeadUnits, "saturated": SaturatedUnits}

_MOST = 2**30
"""Counters stop here: a higher count makes no difference."""
_MEMORY = 0.9
"""Decay per measured step: about the last ten count."""
_STRAY = 0.05
"""Share of values that a saturated unit may have within its range, since some inputs pass through zero."""


def from_state(state: dict[str, Any]) -> DeadUnits | SaturatedUnits:
    """The tracker that a `state_dict` was taken from."""
    units = state["idle"] if state["kind"] == "dead" else state["inside"]
    tracker = KINDS[state["kind"]](np.shape(units)[-1])
    tracker.load_state_dict(state)
    return tracker


def _mean(flags: Any) -> Any:
    return flags.float().mean() if isinstance(flags, Tensor) else float(flags.mean())


def _on_host(values: Any) -> Any:
    return values.cpu().numpy() if isinstance(values, Tensor) else values.copy()
