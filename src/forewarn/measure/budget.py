"""Keeps the time of detailed measurements to a share of the run's time, by measuring less often."""

from __future__ import annotations

import math
from statistics import median

DECIDED_EVERY = 500
"""The interval changes only at multiples of this many steps."""
_FEWEST_MEASURED = 4
"""Minimum number of measured steps to decide on: a single slow one proves nothing."""
_SETTLING_STEPS = 2
"""Steps after an exempt one that are not counted: on an accelerator, its readings are judged there."""


class Budget:
    """Adds up what measured steps cost beyond others, and says which interval would keep that to a share of the time.

    Steps that are exempt, those of the dense start and after warnings, count neither as cost nor as time.
    """

    def __init__(self, share: float, planned: int) -> None:
        self.share = share
        self._planned = planned
        self._counts_from = 0
        self._last: tuple[float, float] | None = None
        self._begin()

    def _begin(self) -> None:
        self._seconds = self._own = 0.0
        self._num_steps = self._num_measured = 0
        self._of_light_steps: list[float] = []

    def see(self, step: int, seconds: float, own: float, *, is_measured: bool, is_exempt: bool) -> None:
        """A step has ended, after so many seconds of the run, and so many seconds of the monitor in it."""
        last, self._last = self._last, (seconds, own)
        if is_exempt:
            self._counts_from = step + 1 + _SETTLING_STEPS
        if last is None or step < self._counts_from:
            return
        self._num_steps += 1
        self._num_measured += is_measured
        self._seconds += seconds - last[0]
        self._own += own - last[1]
        if not is_measured:
            self._of_light_steps.append(own - last[1])

    def interval(self, present: int) -> int | None:
        """A longer interval than the `present` one if detail took more than its share; None if it keeps to it.

        It is the planned one times 1, 2, 5, 10 and so on, so that small changes of the cost change nothing.
        """
        if self._num_measured < _FEWEST_MEASURED:
            return None
        usual = median(self._of_light_steps) if self._of_light_steps else 0.0
        detail = self._own - usual * self._num_steps
        training = (self._seconds - detail) / self._num_steps
        of_one = detail / self._num_measured
        self._begin()
        if not of_one > 0 or not training > 0:
            return None
        needed = of_one * (1 - self.share) / (self.share * training) / self._planned
        if needed <= present / self._planned:
            return None
        power: int = 10 ** max(0, math.floor(math.log10(needed)))
        return self._planned * power * next(factor for factor in (1, 2, 5, 10) if factor * power >= needed)
