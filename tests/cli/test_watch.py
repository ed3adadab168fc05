"""`forewarn watch`: the screen, its keys, and the terminal afterwards."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyte
import pytest

from forewarn.config import Config
from forewarn.store import RunWriter
from forewarn.store.reader import StoredSeries
from forewarn.views.run_screen import _over_steps
from tests.cli.conftest import FACTS, Said, block, blocks_of, falling, write_run


class Terminal:
    """A terminal of 80 × 24 in which the command runs."""

    def __init__(self, *arguments: str | Path) -> None:
        self.screen = pyte.Screen(80, 24)
        self.sent = b""
        """Everything that was written to the terminal."""
        self._stream = pyte.ByteStream(self.screen)
        self.master, self.slave = pty.openpty()
        self.resize(80, 24)
        self.before = termios.tcgetattr(self.slave)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "forewarn", *map(str, arguments)],
            stdin=self.slave, stdout=self.slave, stderr=self.slave, start_new_session=True,
            env={**os.environ, "TERM": "xterm-256color"},
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a job in the background ignores it
        )  # fmt: skip

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.screen.resize(rows, columns)

    def press(self, keys: str) -> None:
        os.write(self.master, keys.encode())

    def wait_for(self, words: str, seconds: float = 30.0) -> str:
        """The screen, once it shows these words."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self._read()
            if words in (shown := "\n".join(self.screen.display)):
                return shown
        raise AssertionError(f"{words!r} was not shown; the screen:\n" + "\n".join(self.screen.display))

    def end(self) -> int:
        """Wait for the command; its exit code."""
        until = time.monotonic() + 30
        while self.process.poll() is None and time.monotonic() < until:
            self._read()
        self._read()
        return self.process.wait(1)

    def _read(self) -> None:
        if select.select([self.master], [], [], 0.1)[0]:
            received = os.read(self.master, 1 << 16)
            self.sent += received
            self._stream.feed(received)


@pytest.fixture
def terminal() -> Iterator[Callable[..., Terminal]]:
    opened: list[Terminal] = []

    def make(*arguments: str | Path) -> Terminal:
        opened.append(Terminal(*arguments))
        return opened[-1]

    yield make
    for one in opened:
        one.process.kill()
        one.process.wait()
        os.close(one.master)
        os.close(one.slave)


def test_the_screen_follows_the_run_the_keys_and_the_size(terminal, tmp_path: Path) -> None:
    with contextlib.closing(RunWriter(tmp_path / "run", info=FACTS, config={})) as writer:
        for step in range(40):
            writer.append(step, blocks_of(step, 1.0))
        writer.flush()
        watching = terminal("watch", tmp_path / "run")
        shown = watching.wait_for("q quit")
        assert "running" in shown
        assert "none so far" in shown
        assert "step 39" in shown
        writer.append(40, [block(40, "train/loss", 0.5)])
        writer.flush()
        watching.wait_for("step 40")
        watching.press("\t\x1b[B")
        watching.wait_for("› blocks.1.weight")
        watching.press("\r")
        shown = watching.wait_for("esc back")
        assert "blocks.1.weight" in watching.wait_for("weight norm")
        watching.press("\x1b")
        watching.wait_for("tab other list")
        watching.resize(60, 16)
        watching.process.send_signal(signal.SIGWINCH)
        time.sleep(0.3)
        watching.press("m")
        assert all(len(line.rstrip()) <= 60 for line in watching.wait_for("q quit").splitlines())
        watching.press("q")
        assert watching.end() == 0


@pytest.mark.parametrize("leave", [
    lambda process: process.send_signal(signal.SIGINT),
    lambda process: process.terminate(),
], ids=["Ctrl-C", "SIGTERM"])  # fmt: skip
def test_the_terminal_is_left_as_it_was(leave, terminal, tmp_path: Path) -> None:
    write_run(tmp_path / "run", falling(40))
    watching = terminal("watch", tmp_path / "run")
    watching.wait_for("q quit")
    assert termios.tcgetattr(watching.slave) != watching.before
    leave(watching.process)
    watching.end()
    assert termios.tcgetattr(watching.slave) == watching.before
    assert watching.sent.rfind(b"\x1b[?1049l") > watching.sent.rfind(b"\x1b[?1049h"), "the screen from before is back"
    assert not watching.screen.cursor.hidden


def test_without_a_terminal_it_prints_once(forewarn: Callable[..., Said], tmp_path: Path) -> None:
    write_run(tmp_path / "run", falling(40))
    said = forewarn("watch", tmp_path / "run")
    assert said.code == 0
    assert "Alerts" in said.out
    assert "\x1b" not in said.out, "names from a run are escaped"


def test_it_says_where_the_time_of_a_step_goes_as_check_does(forewarn: Callable[..., Said], tmp_path: Path) -> None:
    with contextlib.closing(RunWriter(tmp_path / "run", info=FACTS, config=Config().to_dict())) as writer:
        for step, loss in enumerate(falling(40)):
            seconds = (0.05, 0.05, 0.3) if step < 30 else (0.05, 0.05, 0.1)
            phases = block(step, "speed/phase_seconds", *seconds, scopes=("data", "\x1b[31m", "backward"))
            writer.append(step, [*blocks_of(step, loss), *([phases] if step % 10 == 9 else [])])
    # A reading stands for the ten steps up to it, but the first one for itself alone.
    shares = f"backward {100 * 7.3 / 10.4:.0f}%, data 15%, "
    for command in ("watch", "check"):
        said = forewarn(command, tmp_path / "run")
        assert "time per step" in said.out
        assert shares in said.out
        assert "\x1b" not in said.out


def test_a_run_that_has_no_step_yet(forewarn: Callable[..., Said], tmp_path: Path) -> None:
    with contextlib.closing(RunWriter(tmp_path / "run", info=FACTS, config={})) as writer:
        writer.flush()
        assert "no step has been recorded yet" in forewarn("watch", tmp_path / "run").out


def test_a_missing_run_is_one_sentence(forewarn: Callable[..., Said], tmp_path: Path) -> None:
    said = forewarn("watch", tmp_path / "nowhere")
    assert said.code == 3
    assert said.err.startswith("Error: ")
    assert len(said.err.splitlines()) == 1


@pytest.mark.parametrize("spike", [100.0, float("nan"), float("-inf")])
def test_no_spike_is_lost_between_columns(spike: float) -> None:
    values = np.ones(10_000, np.float32)
    values[4_567] = spike
    series = StoredSeries(np.arange(10_000), np.zeros(10_000), values)
    columns = _over_steps(series, 9_999, 50)
    assert len(columns) == 50
    assert columns[22] == pytest.approx(spike, nan_ok=True)
    assert [value for index, value in enumerate(columns) if index != 22] == [1.0] * 49


def test_series_with_few_readings_share_the_axis_of_steps() -> None:
    series = StoredSeries(np.array([0, 50]), np.zeros(2), np.array([1.0, 2.0], np.float32))
    assert _over_steps(series, 99, 10) == [1.0] * 5 + [2.0] * 5
