"""Ctrl-C ends training at a point from which it can be resumed."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forewarn.lab.trainer import Trainer


@contextlib.contextmanager
def interruptible(trainer: Trainer) -> Iterator[None]:
    """Let the first Ctrl-C end training after the current step, and the second one at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        if trainer.interrupted:
            raise KeyboardInterrupt
        trainer.interrupted = True
        trainer.stop("interrupted by Ctrl-C")

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
