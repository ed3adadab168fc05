"""How often the monitor of this rank measures in detail, so that all ranks do it on the same steps."""

from __future__ import annotations

from forewarn.measure.budget import DECIDED_EVERY, Budget
from forewarn.measure.exchange import Exchange
from forewarn.measure.schedule import Escalation


class Cadence:
    """Changes the schedule: every step after an anomaly, fewer steps if detail exceeds its budget.

    In a distributed run, a change takes effect on all ranks at the same step.
    """

    def __init__(self, schedule: Escalation, budget: Budget | None, exchange: Exchange | None) -> None:
        self.schedule = schedule
        self.budget = budget
        self._exchange = exchange
        self.new_interval: int | None = None
        """Steps between detailed measurements from now on, until that is recorded."""

    def follow(self, exchange: Exchange) -> None:
        """Take over the changes on which the ranks have agreed."""
        for first, last in exchange.windows():
            self.schedule.agree(first, last)
        for first, every in exchange.intervals():
            self.schedule.stretch(first, every)

    def escalate(self, step: int) -> None:
        """Measure the steps after this one in detail; in a distributed run from a step on which all ranks agree."""
        if self._exchange is None or self._exchange.off:
            self.schedule.escalate(step)
        else:
            self._exchange.escalate(self.schedule.end(step))

    def look_again(self, step: int) -> None:
        """Measure the next steps in detail, because a warning waits for another check."""
        if self._exchange is None or self._exchange.off:
            self.schedule.look_again(step)
        else:  # by the time that all ranks know, these steps are over
            self._exchange.escalate(self.schedule.end(step))

    def keep_to(self, budget: Budget, step: int, spent: tuple[float, float], *, is_measured: bool) -> None:
        """Measure in detail less often if that has taken more of the run's time than the budget allows.

        `spent`: the seconds of the run, and those of the monitor in it, until the end of this step.
        """
        is_exempt = self.schedule.is_exempt(step)
        budget.see(step, *spent, is_measured=is_measured, is_exempt=is_exempt)
        completed = step + 1
        if completed % DECIDED_EVERY:
            return
        every = budget.interval(self.schedule.every(completed))
        if every is None:
            return
        self.new_interval = every
        if self._exchange is None or self._exchange.off:
            self.schedule.stretch(completed, every)
        else:  # by then all ranks know
            self._exchange.stretch(completed + DECIDED_EVERY, every)
