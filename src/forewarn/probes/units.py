"""Units that do nothing: how long each unit of a layer has been idle, over measured steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor


class IdleUnits:
    """For each unit of one layer, the measured steps and the positions it was read at since it was last alive.

    Kept where the flags are: on a device, only the share of idle units travels.
    """

    def __init__(self, num_units: int) -> None:
        self.idle: Any = np.zeros((2, num_units), np.int64)
        """[2 × units]: measured steps, positions."""
        self.checks = 0
        """Measured steps at which the layer was seen."""

    @property
    def num_units(self) -> int:
        return int(self.idle.shape[1])

    def update(self, alive: Any, positions: int) -> None:
        """Take in which units were alive at one measured step, and at how many positions each was read."""
        if isinstance(alive, Tensor):
            idle = torch.as_tensor(self.idle, device=alive.device)
            self.idle = torch.stack([idle[0] + 1, idle[1] + positions]).masked_fill_(alive, 0)
        else:
            self.idle += [[1], [positions]]
            self.idle[:, alive != 0] = 0
        self.checks += 1

    def share(self, window: int, least_positions: int) -> Any:
        """The share of units that were never alive over the last `window` measured steps and so many positions.

        NaN while fewer have been seen: a number on the host, or a tensor that is still on its device.
        """
        if self.checks < window:
            return float("nan")
        idle = (self.idle[0] >= window) & (self.idle[1] >= least_positions)
        return idle.float().mean() if isinstance(idle, Tensor) else float(idle.mean())

    def state_dict(self) -> dict[str, Any]:
        idle = self.idle.cpu().numpy() if isinstance(self.idle, Tensor) else self.idle
        return {"idle": idle.copy(), "checks": self.checks}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> IdleUnits:
        idle = np.array(state["idle"], np.int64)
        made = cls(idle.shape[1])
        made.idle, made.checks = idle, int(state["checks"])
        return made
