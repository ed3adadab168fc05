"""`forewarn demo`, as a newcomer runs it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from forewarn.views.page.built_page import is_built


def demo(where: Path, *options: str) -> str:
    """What the demo prints, in a process of its own: it sets the number of threads."""
    command = [sys.executable, "-m", "forewarn", "demo", "--steps", "200", *options]
    environment = {**os.environ, "COLUMNS": "80"}
    ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=where, env=environment)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == ""
    return ended.stdout


BATCH_NOISE = 0.1
"""How far the loss of one batch of the demo is from its neighbors."""

STORY = """
What happened
  step # loss #
  step # fault: the learning rate starts to grow by #% per step
  step # forewarn warns: update-ratio-high (loss #)
  step # the loss shows it: #, up from at most # before the fault
  step # end: loss #, back to where it was at step #

The same run with the first remedy
  At step #: Lower the learning rate from # to #.
  without remedy # loss #
  with remedy # loss #

Stored in runs/demo and runs/demo-saved.

Next
  forewarn check runs/demo
  forewarn show runs/demo --step #
  forewarn explain update-ratio-high
"""
"""How the demo ends, with # for every number."""


def test_a_path_that_cannot_be_written_is_said_before_anything_is_trained(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    command = [sys.executable, "-m", "forewarn", "demo", "--run", "file/demo"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, timeout=60)
    assert ended.returncode == 3
    assert ended.stdout == ""
    assert "the demo cannot write to file/demo" in ended.stderr


def verdict(where: Path, run: str) -> dict[str, object]:
    command = [sys.executable, "-m", "forewarn", "check", run, "--json"]
    found: dict[str, object] = json.loads(
        subprocess.run(command, capture_output=True, text=True, check=False, cwd=where).stdout
    )
    return found


def test_the_warning_comes_long_before_the_loss_shows_it_and_the_first_remedy_saves_the_run(tmp_path: Path) -> None:
    out = demo(tmp_path)
    assert max(map(len, out.partition("What happened")[2].splitlines())) <= 80
    warned = re.search(r"step +(\d+)  forewarn warns: ([a-z-]+) \(", out)
    shown = re.search(r"step +(\d+)  the loss shows it: .* before the fault", out)
    assert warned is not None
    assert shown is not None
    assert 66 <= int(warned[1]) <= int(shown[1]) - 30
    remedy = re.search(rf"At step {warned[1]}: Lower the learning rate from (\S+) to (\S+)\.\n", out)
    assert remedy is not None, "the remedy has the numbers of this run"
    assert float(remedy[1]) > 0.001
    before = float(re.findall(r"forewarn warns: .* \(loss (\S+)\)\n", out)[0])
    lost, saved = (
        float(re.findall(rf"{label} .* loss (\S+)\n", out)[0]) for label in ("without remedy", "with remedy")
    )
    assert lost > before + 0.3, "the run is really lost"
    assert saved < before + BATCH_NOISE, "and really saved"
    assert "Stored in runs/demo and runs/demo-saved." in out
    assert f"forewarn check runs/demo\n  forewarn show runs/demo --step {warned[1]}\n" in out
    assert f"forewarn explain {warned[2]}" in out
    report = "\nOpen runs/demo/report.html in a browser to see what happened." if is_built() else ""
    story = STORY.replace("demo-saved.", f"demo-saved.{report}")
    assert re.sub(r"[\d.]+\d|\d|[▁-█]+", "#", out[out.index("What happened") :]).split() == story.split()
    assert (tmp_path / "runs/demo/report.html").exists() == is_built()
    assert verdict(tmp_path, "runs/demo")["exit_code"] != 0
    command = [sys.executable, "-m", "forewarn", "show", "runs/demo", "--step", warned[1]]
    show = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path).stdout
    assert f"step {warned[1]} of 199\n" in show, "the step that the demo points to is the one that is shown"


def test_without_a_fault_the_same_run_is_healthy(tmp_path: Path) -> None:
    out = demo(tmp_path, "--fault", "none", "--run", "healthy")
    assert "end, no warnings" in out
    assert "remedy" not in out
    assert "⚠" not in out
    assert verdict(tmp_path, "healthy")["exit_code"] == 0


def test_without_torch_one_sentence_says_what_to_install(tmp_path: Path) -> None:
    script = "import sys; sys.modules['torch'] = None; from forewarn.cli import main; main(['demo'])"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert ended.returncode == 3
    assert "pip install 'forewarn[torch]'" in ended.stderr
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("option", [["--fault", "meteor"], ["--steps", "150"]])
def test_wrong_options_are_usage_errors(tmp_path: Path, option: list[str]) -> None:
    command = [sys.executable, "-m", "forewarn", "demo", *option]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert ended.returncode == 64
