"""`forewarn watch`: a run on the whole terminal, while it trains."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.console import Console

    from forewarn.views.run_screen import RunScreen

READ_SECONDS = 1.0
"""Time between two looks at a run."""


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--once", is_flag=True, help="Print the screen once, as it is now. Default without a terminal.")
def command(run: Path, once: bool) -> None:
    """Watch a run on the terminal, while it trains or afterwards.

    RUN is the directory of a run. It is only read, so any number of people can watch it, over SSH too.

    \b
    Keys:
      up, down   choose an alert or a layer       enter   open it
      tab        from the alerts to the layers    esc     close it
      m          show another metric              q       quit

    \b
    Examples:
      forewarn watch runs/demo
      ssh gpu-box forewarn watch --once runs/big
    """
    from forewarn.cli.terminal import from_run, output, show
    from forewarn.views.bars import ASCII_BARS, BARS
    from forewarn.views.run_screen import screen_of

    console = output()
    bars = ASCII_BARS if console.options.ascii_only else BARS
    screen = from_run(run, lambda stored: screen_of(stored, bars))
    if once or not console.is_terminal:
        show(screen.picture(min(console.width, 120)), console=console)
        return
    with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C is a way to leave, like q
        _follow(run, screen, console)


def _follow(path: Path, screen: RunScreen, console: Console) -> None:
    """Draw the screen until a person quits: again after each key, each change of the run or of the terminal's size."""
    from rich.live import Live

    from forewarn.cli.keys import keys
    from forewarn.cli.terminal import from_run
    from forewarn.store.run_summary import stamp_of
    from forewarn.views.run_screen import snapshot

    seen, looked = stamp_of(path), time.monotonic()
    drawn_for = None
    with keys() as next_keys, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            if console.size != drawn_for:
                drawn_for = console.size
                live.update(screen.picture(console.width, console.height), refresh=True)
            pressed = next_keys(0.1)
            if "q" in pressed:
                return
            layer = screen.open_layer
            for key in pressed:
                screen.press(key)
            is_due = time.monotonic() - looked >= READ_SECONDS
            if screen.open_layer != layer or (is_due and stamp_of(path) != seen):
                seen = stamp_of(path)
                screen.shown = from_run(path, lambda stored: snapshot(stored, screen.open_layer))
                drawn_for = None
            if is_due:
                looked = time.monotonic()
            if pressed:
                drawn_for = None
