"""Finds the limit of gradient clipping that the loop does itself, from the norm before and after it."""

from __future__ import annotations

import math

_TOLERANCE = 1e-3
"""How far norms may be apart and still count as equal: `clip_grad_norm_` adds 1e-6 to the norm it divides by."""


class ForeignClipping:
    """The limit that the norm at the optimizer step shows: twice the same value below the norm before it.

    Clipping by value usually leaves a different norm on every step, so it shows no limit.
    """

    def __init__(self) -> None:
        self.limit: float | None = None
        self._clipped_to = math.nan

    def see(self, before: float, at_step: float) -> None:
        """Compare the norm at the end of the backward pass with the norm at the optimizer step."""
        if not (math.isfinite(before) and at_step > 0):
            return
        is_clipped = at_step < before * (1 - _TOLERANCE)
        if is_clipped:
            same = math.isclose(at_step, self._clipped_to, rel_tol=_TOLERANCE)
            self.limit = _rounded(at_step) if same else None
            self._clipped_to = at_step
        elif self.limit is not None and at_step > self.limit * (1 + _TOLERANCE):
            self.limit = None  # it is no longer clipped, or to something else


def _rounded(limit: float) -> float:
    """The number that a person would have written."""
    short = float(f"{limit:.3g}")
    return short if math.isclose(short, limit, rel_tol=_TOLERANCE) else limit
