"""Each run directory has one writer, however many processes start at once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from forewarn.store import RunWriter, open_run
from forewarn.types import RunInfo

NUM_PROCESSES = 12

_START_TOGETHER = r"""
import os, signal, sys, time
IMPORTS

starting, start = os.pipe()
children = []
for number in range(NUM_PROCESSES):
    if not (child := os.fork()):
        os.close(start)
        os.read(starting, 1)  # all of them are woken at once, when the last end of the pipe is closed
        try:
            writer = begin()
            os.write(1, f"has {writer.path}\n".encode())
            time.sleep(1)  # until the others have tried
            writer.close()
        except FileExistsError as error:
            os.write(1, f"refused {error}\n".encode())
        os._exit(0)
    children.append(child)
os.close(starting)
os.close(start)
for child in children:
    os.waitpid(child, 0)
"""

_WRITER = """
from forewarn.store import RunWriter
from forewarn.types import RunInfo

def begin():
    return RunWriter("runs/mine", info=RunInfo(), config={})
"""

_WATCH = """
import forewarn, torch

torch.set_num_threads(1)
time.strftime = lambda form: "2026-01-01_00-00-00"  # all in one second, however slow the machine is

model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # before the fork: the first one imports much of torch
watch = forewarn.watch

def begin():
    return watch(model, optimizer, views=[])._writer
"""


def _outcomes(imports: str, directory: Path) -> list[str]:
    script = _START_TOGETHER.replace("IMPORTS", imports).replace("NUM_PROCESSES", str(NUM_PROCESSES))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=directory, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_processes_that_start_in_the_same_second_have_a_run_each(tmp_path):
    outcomes = _outcomes(_WATCH, tmp_path)
    name = "runs/2026-01-01_00-00-00"
    assert sorted(outcomes) == sorted(
        [f"has {name}", *(f"has {name}-{number}" for number in range(2, NUM_PROCESSES + 1))]
    )
    for path in (tmp_path / "runs").iterdir():
        open_run(path).close()


def test_of_processes_that_name_the_same_run_one_has_it_and_the_others_are_told_that_it_lives(tmp_path):
    outcomes = _outcomes(_WRITER, tmp_path)
    assert len(outcomes) == NUM_PROCESSES
    assert outcomes.count("has runs/mine") == 1
    for outcome in outcomes:
        if outcome != "has runs/mine":
            assert outcome.startswith(
                "refused runs/mine is being written by a process that is still running; name another"
            )
            assert "remove" not in outcome
            assert "delete" not in outcome
    open_run(tmp_path / "runs" / "mine").close()


def test_a_run_is_free_again_when_its_process_was_killed(tmp_path):
    script = _WRITER + "import os, signal\nwriter = begin()\nos.kill(os.getpid(), signal.SIGKILL)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=environment)
    with pytest.raises(FileExistsError, match="already holds a run; continue it with resume=True"):
        RunWriter(tmp_path / "runs" / "mine", info=RunInfo(), config={})
    RunWriter(tmp_path / "runs" / "mine", info=RunInfo(), config={}, resume_at=0).close()


def test_a_run_that_this_process_still_writes_is_refused_until_it_is_closed(tmp_path, write):
    writer = write()
    with pytest.raises(FileExistsError, match="still running; name another path with run=, or close its monitor first"):
        write()
    writer.close()
    with pytest.raises(FileExistsError, match="already holds a run"):
        write()
    write(resume_at=0)
    with pytest.raises(FileExistsError, match="still running"):
        write()


def test_where_directories_have_no_locks_the_first_still_wins(tmp_path, write, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("forewarn.store.claim.fcntl.flock", refuse)
    write()
    with pytest.raises(FileExistsError, match="already holds a run"):
        write()
