"""Single keys from the terminal, without waiting for enter."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from types import FrameType

NAMES = {
    "\x1b[A": "up", "\x1bOA": "up", "k": "up", "\x1b[B": "down", "\x1bOB": "down", "j": "down", "\r": "enter",
    "\n": "enter", "\x1b": "escape", "\t": "tab",
}  # fmt: skip
"""What a terminal sends, and the key it stands for; any other character is the key itself."""

_SENT = re.compile(r"\x1b[\[O][0-9;]*[A-Za-z~]|.", re.DOTALL)
"""One key in what a terminal has sent."""

NextKeys = Callable[[float], list[str]]
"""Waits at most this many seconds for keys; empty if there were none."""


@contextlib.contextmanager
def keys() -> Iterator[NextKeys]:
    """Read keys until the block ends, by whatever means; then the terminal is as it was.

    Without a terminal, or on a system without termios, no key ever comes.
    """
    try:
        import termios
        import tty

        source = sys.stdin.fileno()
        before = termios.tcgetattr(source)
    except Exception:  # there is no termios, no terminal, or no standard input
        yield _no_keys
        return
    handlers = {number: signal.signal(number, _end) for number in (signal.SIGTERM, signal.SIGHUP)}
    handlers[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, signal.SIG_IGN)  # the shell would get a changed terminal
    try:
        tty.setcbreak(source)
        yield lambda seconds: _keys(source, seconds)
    finally:
        termios.tcsetattr(source, termios.TCSADRAIN, before)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _no_keys(seconds: float) -> list[str]:
    time.sleep(seconds)
    return []


def _keys(source: int, seconds: float) -> list[str]:
    if not select.select([source], [], [], seconds)[0]:
        return []
    sent = os.read(source, 1024).decode(errors="replace")
    if not sent:  # the terminal is gone
        raise SystemExit(0)
    return [NAMES.get(key, key) for key in _SENT.findall(sent)]


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
