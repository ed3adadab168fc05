"""What is stored about a run that hangs."""

from __future__ import annotations

import faulthandler
import logging

from forewarn.store.deletion import STACKS
from forewarn.store.writer import RunWriter

_log = logging.getLogger("forewarn")


def report_stall(run: RunWriter, step: int, phase: str, seconds: float) -> None:
    """Log that a step hangs, and write the stacks of all threads. Called by the thread that noticed it."""
    stacks = run.path / STACKS
    try:
        _log.warning(
            "step %d hangs: no sign of the loop for %.0f s in the phase %r; the stacks of all threads are in %s. "
            "Time for evaluation or checkpoints is marked by `with monitor.pause(...)`",
            step, seconds, phase, stacks,
        )  # fmt: skip
        run.event("stalled", phase=phase, seconds=seconds)
        with stacks.open("w") as file:
            faulthandler.dump_traceback(file)
    except OSError as error:
        _log.warning("the stacks were not written: %s", error)
