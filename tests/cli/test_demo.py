"""`forewarn demo`, as a newcomer runs it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest


def demo(where: Path, *options: str) -> str:
    """What the demo prints, in a process of its own: it sets the number of threads."""
    command = [sys.executable, "-m", "forewarn", "demo", "--steps", "100", *options]
    environment = {**os.environ, "COLUMNS": "200"}
    ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=where, env=environment)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == ""
    return ended.stdout


def verdict(where: Path, run: str) -> dict[str, object]:
    command = [sys.executable, "-m", "forewarn", "check", run, "--json"]
    found: dict[str, object] = json.loads(
        subprocess.run(command, capture_output=True, text=True, check=False, cwd=where).stdout
    )
    return found


def test_the_warning_comes_before_the_loss_shows_the_fault_and_says_what_to_do(tmp_path: Path) -> None:
    out = demo(tmp_path)
    warned = re.search(r"step +(\d+)  forewarn warns: ([a-z-]+);", out)
    shown = re.search(r"step +(\d+)  the loss is .* before the fault", out)
    assert warned is not None
    assert shown is not None
    assert 61 <= int(warned[1]) < int(shown[1])
    assert "Set the learning rate back to 0.001" in out, "the remedy has the numbers of this run"
    assert "The run is stored in runs/demo." in out
    assert f"forewarn check runs/demo\n  forewarn show runs/demo --step {warned[1]}\n" in out
    assert f"forewarn explain {warned[2]}" in out
    assert verdict(tmp_path, "runs/demo")["exit_code"] != 0


def test_without_a_fault_the_same_run_is_healthy(tmp_path: Path) -> None:
    out = demo(tmp_path, "--fault", "none", "--run", "healthy")
    assert "the end, without a warning" in out
    assert "What to do" not in out
    assert verdict(tmp_path, "healthy")["exit_code"] == 0


def test_without_torch_one_sentence_says_what_to_install(tmp_path: Path) -> None:
    script = "import sys; sys.modules['torch'] = None; from forewarn.cli import main; main(['demo'])"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert ended.returncode == 3
    assert "pip install 'forewarn[torch]'" in ended.stderr
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("option", [["--fault", "meteor"], ["--steps", "5"]])
def test_wrong_options_are_usage_errors(tmp_path: Path, option: list[str]) -> None:
    command = [sys.executable, "-m", "forewarn", "demo", *option]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert ended.returncode == 64
