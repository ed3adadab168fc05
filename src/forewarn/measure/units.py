"""Dead and saturated units, followed over measured steps on the device that holds them.

On an accelerator only the share of such units is transferred to the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.float64]
Positions = NDArray[np.int64]

_MOST = 2**30
"""Counters stop here: a higher count makes no difference."""
_MEMORY = 0.9
"""Decay per measured step: about the last ten count."""
_STRAY = 0.05
"""Share of values that a saturated unit may have within its range, since some inputs pass through zero."""


class _Followed:
    """The units of several outputs that have as many of them, in arrays with a row per output.

    Of units on a device there is one output, so that no number has to travel there.
    """

    kind = ""

    def __init__(self, num_units: int) -> None:
        self.num_units = num_units
        self.scopes: tuple[str, ...] = ()
        """Of the rows, in their order."""
        self._checks = np.zeros(0, np.int64)
        """Per output: the number of measured steps on which it was read."""

    def rows_of(self, scopes: tuple[str, ...]) -> Any:
        """The rows of these outputs, as an index; new outputs get new ones."""
        new = [scope for scope in scopes if scope not in self.scopes] if scopes != self.scopes else []
        if new:
            self.scopes += tuple(new)
            self._checks = np.concatenate([self._checks, np.zeros(len(new), np.int64)])
            self._grow(len(new))
        if scopes == self.scopes:
            return slice(None)
        row_of = {scope: row for row, scope in enumerate(self.scopes)}
        return np.array([row_of[scope] for scope in scopes], np.intp)

    def _grow(self, num_outputs: int) -> None:
        raise NotImplementedError

    def _in_a_list(self, shares: Any, is_certain: NDArray[np.bool_]) -> Sequence[Any]:
        """The shares; NaN where too little was read. On the host they are floats, else tensors on their device."""
        if isinstance(shares, Tensor):
            return [share if certain else np.nan for share, certain in zip(shares, is_certain, strict=True)]
        numbers: list[float] = np.where(is_certain, shares, np.nan).tolist()
        return numbers


class DeadUnits(_Followed):
    """For each unit, the number of measured steps and of positions since it last fired."""

    kind = "dead"

    def __init__(self, num_units: int) -> None:
        super().__init__(num_units)
        self._idle: Any = np.zeros((2, 0, num_units), np.int32)

    def _grow(self, num_outputs: int) -> None:
        self._idle = np.concatenate([_on_host(self._idle), np.zeros((2, num_outputs, self.num_units), np.int32)], 1)

    def update(self, rows: Any, fired: Any, sums: Any, positions: Positions) -> None:
        """Add one measured step: which units fired, and at how many positions those of each output were read."""
        if isinstance(fired, Tensor):
            idle = torch.as_tensor(self._idle, device=fired.device)
            grown = torch.stack([idle[0] + 1, idle[1] + int(positions[0])]).clamp_(max=_MOST)
            self._idle = grown.masked_fill_(fired, 0)
        else:
            idle = self._idle[:, rows].astype(np.int64)
            idle[0] += 1
            idle[1] += positions[:, None]
            np.minimum(idle, _MOST, out=idle)
            self._idle[:, rows] = idle * (fired == 0)
        self._checks[rows] += 1

    def shares(self, rows: Any, window: int, least_positions: int) -> Sequence[Any]:
        """The share of units that were zero throughout the last `window` measured steps and `least_positions`.

        NaN while fewer steps have been seen.
        """
        idle = self._idle if isinstance(self._idle, Tensor) else self._idle[:, rows]
        dead = (idle[0] >= window) & (idle[1] >= least_positions)
        return self._in_a_list(_mean(dead), self._checks[rows] >= window)

    def state_of(self, scope: str) -> dict[str, Any]:
        """What is known about one output."""
        row = self.scopes.index(scope)
        return {"kind": self.kind, "idle": _on_host(self._idle)[:, row].copy(), "checks": int(self._checks[row])}

    def restore(self, scope: str, state: dict[str, Any]) -> None:
        """Continue from `state_of`."""
        rows = self.rows_of((scope,))
        self._idle[:, rows] = np.array(state["idle"], np.int32)[:, None]
        self._checks[rows] = int(state["checks"])


class SaturatedUnits(_Followed):
    """For each unit, the share of positions at which it was within its range; recent steps count most."""

    kind = "saturated"

    def __init__(self, num_units: int) -> None:
        super().__init__(num_units)
        self._inside: Any = np.zeros((0, num_units))
        self._positions = np.zeros(0)
        self._seen = np.zeros(0, np.int64)
        """All positions ever read; `_positions`, in contrast, decays as `_inside` does."""

    def _grow(self, num_outputs: int) -> None:
        self._inside = np.concatenate([_on_host(self._inside), np.zeros((num_outputs, self.num_units))])
        self._positions = np.concatenate([self._positions, np.zeros(num_outputs)])
        self._seen = np.concatenate([self._seen, np.zeros(num_outputs, np.int64)])

    def update(self, rows: Any, fired: Any, sums: Any, positions: Positions) -> None:
        """Add one measured step: at how many positions each unit was within its range."""
        if isinstance(sums, Tensor):
            self._inside = torch.as_tensor(self._inside, device=sums.device) * _MEMORY + sums
        else:
            self._inside[rows] = self._inside[rows] * _MEMORY + sums
        self._positions[rows] = self._positions[rows] * _MEMORY + positions
        self._seen[rows] += positions
        self._checks[rows] += 1

    def shares(self, rows: Any, window: int, least_positions: int) -> Sequence[Any]:
        """The share of units that were almost never within their range; NaN while too few positions have been read."""
        strays = _STRAY * self._positions[rows]
        if isinstance(self._inside, Tensor):
            shares = _mean(self._inside <= float(strays[0]))
        else:
            shares = _mean(self._inside[rows] <= strays[:, None])
        return self._in_a_list(shares, (self._checks[rows] >= window) & (self._seen[rows] >= least_positions))

    def state_of(self, scope: str) -> dict[str, Any]:
        """What is known about one output."""
        row = self.scopes.index(scope)
        return {
            "kind": self.kind, "inside": _on_host(self._inside)[row].copy(), "positions": float(self._positions[row]),
            "seen": int(self._seen[row]), "checks": int(self._checks[row]),
        }  # fmt: skip

    def restore(self, scope: str, state: dict[str, Any]) -> None:
        """Continue from `state_of`."""
        rows = self.rows_of((scope,))
        self._inside[rows] = np.array(state["inside"], np.float64)
        self._positions[rows], self._seen[rows] = float(state["positions"]), int(state["seen"])
        self._checks[rows] = int(state["checks"])


Units = DeadUnits | SaturatedUnits
KINDS: dict[str, type[DeadUnits] | type[SaturatedUnits]] = {"dead": DeadUnits, "saturated": SaturatedUnits}


class UnitsOfOutputs:
    """The units of all outputs; those of outputs that have as many are followed together."""

    def __init__(self) -> None:
        self._together: dict[tuple[str, int, str], Units] = {}
        """By kind, number of units, and scope if the units of one output are followed alone."""
        self._where: dict[str, Units] = {}
        """By scope: where its units are followed now."""

    def of(self, kind: str, num_units: int, scopes: tuple[str, ...], is_alone: bool) -> Units:
        """Where the units of these outputs are followed; what is known about them moves there, if it still fits."""
        key = (kind, num_units, scopes[0] if is_alone else "")
        if (units := self._together.get(key)) is None:
            units = self._together[key] = KINDS[kind](num_units)
        for scope in scopes:
            before = self._where.get(scope)
            if before is not units:
                self._where[scope] = units
                if before is not None and (before.kind, before.num_units) == (kind, num_units):
                    units.restore(scope, before.state_of(scope))
        return units

    def state_dict(self) -> dict[str, Any]:
        return {
            "scopes": list(self._where),
            "units": [units.state_of(scope) for scope, units in self._where.items()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._together, self._where = {}, {}
        for scope, of_scope in zip(state["scopes"], state["units"], strict=True):
            num_units = np.shape(of_scope["idle"] if of_scope["kind"] == "dead" else of_scope["inside"])[-1]
            self.of(of_scope["kind"], num_units, (scope,), False).restore(scope, of_scope)


def _mean(flags: Any) -> Any:
    return flags.float().mean(-1) if isinstance(flags, Tensor) else flags.mean(-1)


def _on_host(values: Any) -> Any:
    return values.cpu().numpy() if isinstance(values, Tensor) else values
