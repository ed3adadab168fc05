"""A run is read by the commands and by `open_run` while a real process writes, compacts, is killed and resumes it.

The readings of step s have the value s, or s and the number of the layer: a reader can tell whether it has them right.
No reader says that a healthy run is damaged, and each sees one moment of it.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from forewarn.store import ResumedError, Run, RunError, open_run
from forewarn.types import Block
from tests.store.rows import append_all, bits, training

_WRITE = """
import itertools, sys, time
import numpy as np
from forewarn.store import RunWriter, background, chunks, compaction, merging
from forewarn.types import Alert, AlertState, Block, Distribution, Finding, RunInfo, Severity

path, first, pause = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
background.TAIL_ROWS, background._PAUSE_SECONDS = 40, 0.01
compaction.MOST_ROWS = 64
merging._NEIGHBOURS, merging.MOST_ROWS = 3, 4000
chunks._BAND_VALUES = 256
layers = tuple(f"layer{i}" for i in range(20))
counts = np.zeros((20, 2, 64), np.int64)
writer = RunWriter(path, info=RunInfo(), config={}, resume_at=first or None)
for step in itertools.count(first):
    now = time.time()
    blocks = [Block(step, now, "train/loss", ("",), np.float32([step]))]
    distributions = []
    if step % 3 == 0:
        blocks.append(Block(step, now, "gradient/norm", layers, step + np.arange(20, dtype=np.float32)))
    if step % 50 == 0:
        counts[:, 1, 10] = step + 1
        distributions.append(Distribution(step, now, "gradient/histogram", layers, counts, np.zeros(20, np.int64)))
        finding = Finding("L101", "", step, Severity.INFO, step, 0.0)
        alert = Alert("L101", "x", "", Severity.INFO, AlertState.RESOLVED, step, step, step, finding)
        writer.record(step, alerts=[alert], findings=[finding])
    writer.append(step, blocks, distributions)
    time.sleep(pause)
"""


class _Trainer:
    """Writes a run in a process of its own, which is killed and resumes from some step, over and over."""

    def __init__(self, path: Path, seed: int, pause: float = 0.0003) -> None:
        self._path = path
        self._random = random.Random(seed)
        self._pause = pause
        self._process = self._started(0)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._work)
        self.resumes: list[int] = []
        """The steps from which the run was resumed."""
        self.errors: list[BaseException] = []

    def __enter__(self) -> _Trainer:
        _wait_for(lambda: _last_step(self._path) > 100)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._process.kill()
        self._process.wait()

    def _started(self, first: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", _WRITE, str(self._path), str(first), str(self._pause)])

    def _work(self) -> None:
        try:
            while not self._stopping.wait(self._random.uniform(0.7, 2.5)):
                assert self._process.poll() is None, "the writer ended by itself"
                self._process.kill()
                self._process.wait()
                after = _last_step(self._path) + 1
                first = self._random.choice([after, after, self._random.randint(after // 2, after)])
                self.resumes.append(first)  # before a reader can see it
                self._process = self._started(first)
                _wait_for(lambda first=first: _last_step(self._path) >= first)
        except BaseException as error:
            self.errors.append(error)


def _last_step(path: Path) -> int:
    if not (path / "run.json").exists():
        return -1
    with open_run(path) as run:
        step = run.last_step
    return -1 if step is None else step


def _wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def _check_moment(run: Run, slowness: random.Random) -> int:
    """Everything that a frozen run gives, by itself and against all the rest; returns the last step."""
    last = run.last_step
    assert last is not None
    steps = np.arange(last + 1)
    expected = {
        ("train/loss", ""): steps.astype(np.float32),
        ("gradient/norm", "layer7"): steps[::3].astype(np.float32) + 7,
    }
    replayed = {key: [] for key in expected}
    for step, blocks in run.steps():
        assert [block.name for block in blocks] == ["train/loss", "gradient/norm"][: 2 - (step % 3 != 0)]
        for (_, scope), block in zip(expected, blocks, strict=False):
            replayed[block.name, scope].append(float(block.values[block.scopes.index(scope)]))
        if slowness.random() < 0.003:
            time.sleep(slowness.uniform(0, 0.05))
    for (name, scope), values in expected.items():
        series = run.series(name, scope)
        assert np.array_equal(series.steps, steps[::3] if scope else steps)
        assert np.array_equal(series.values, values)
        assert replayed[name, scope] == values.tolist()
    assert run.num_steps == len(steps)
    histograms = run.histograms("gradient/histogram", "layer3")
    assert np.array_equal(histograms.steps, steps[::50])
    assert np.array_equal(histograms.counts[:, 1, 10], steps[::50] + 1)
    for records in (run.alerts(), run.findings()):  # these are queued a moment before their step
        told = [int(getattr(record, "since", getattr(record, "step", -1))) for record in records]
        assert told in (list(range(0, last + 1, 50)), list(range(0, last + 51, 50)))
    assert run.last_step == last
    return last


def _check_command(folder: Path, *arguments: str) -> int:
    """The last step that a command saw."""
    command = [sys.executable, "-m", "forewarn", *arguments]
    said = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert said.returncode in (0, 1, 2), said.stderr
    assert not said.stderr
    if arguments[0] == "check":
        told = json.loads(said.stdout)
        assert all(alert["since"] <= alert["last"] <= told["last_step"] for alert in told["alerts"])
        return int(told["last_step"])
    if arguments[0] == "ls":
        assert "unreadable" not in said.stdout
        [(steps, loss)] = re.findall(r"^run\s+(\d+)\s+([\d.e+-]+)", said.stdout, re.MULTILINE)
        assert float(loss) == pytest.approx(int(steps) - 1, rel=1e-3)
        return int(steps) - 1
    [(step, last)] = re.findall(r"step (\d+)(?: of (\d+))?", said.stdout)
    [layer_7] = re.findall(r"layer7\s+([\d.e+-]+)", said.stdout)
    assert float(layer_7) == pytest.approx(int(step) + 7, rel=1e-2)
    return int(last or step)


@pytest.mark.parametrize(
    ("seconds", "seed"), [(12, 0), *(pytest.param(60, seed, marks=pytest.mark.slow) for seed in (1, 2, 3))]
)
def test_readers_of_a_run_that_is_written_killed_and_resumed_see_one_moment_of_it(tmp_path, seconds, seed):
    path, slowness = tmp_path / "run", random.Random(seed)

    def open_and_check() -> int:
        for _ in range(50):
            try:
                with open_run(path) as run:
                    return _check_moment(run.freeze(), slowness)
            except ResumedError:  # a caller of open_run is told; the commands start again by themselves
                continue
        raise AssertionError("resumed during every reading")

    readers = [
        open_and_check,
        lambda: _check_command(tmp_path, "check", "--json", "run"),
        lambda: _check_command(tmp_path, "show", "run"),
        lambda: _check_command(tmp_path, "ls", "."),
    ]
    seen, num_resumes, num_reads = 0, 0, 0
    with _Trainer(path, seed) as trainer:
        end = time.monotonic() + seconds
        while (time.monotonic() < end or num_reads < len(readers)) and not trainer.errors:
            last = readers[num_reads % len(readers)]()
            lowest = min([seen, *(first - 1 for first in trainer.resumes[num_resumes:])])
            assert last >= lowest, "steps were there before that are missing now"
            seen, num_resumes = (
                (last, num_resumes) if len(trainer.resumes) == num_resumes else (0, len(trainer.resumes))
            )
            num_reads += 1
    assert not trainer.errors
    assert trainer.resumes
    assert num_reads >= len(readers)


def test_one_reader_stays_open_while_a_run_is_killed_and_resumed(tmp_path):
    path, num_moments = tmp_path / "run", 0
    with _Trainer(path, seed=5) as trainer:
        end = time.monotonic() + 6
        with open_run(path) as run:
            while time.monotonic() < end and not trainer.errors:
                loss = run.series("train/loss")
                assert np.array_equal(loss.values, np.arange(len(loss)))
                try:
                    for place, (step, blocks) in enumerate(run.steps()):
                        assert place == step == int(blocks[0].values[0])
                        if place % 500 == 0:
                            time.sleep(0.02)
                    num_moments += 1
                except ResumedError:
                    continue
    assert not trainer.errors
    assert num_moments


def test_rows_that_are_compacted_together_with_newer_ones_while_they_are_read(tmp_path, write, small_chunks):
    """What was once reported as damage: a chunk that reaches past the rows that there were at first."""
    rows = training(400)
    writer = write()
    append_all(writer, rows[:48])
    writer.flush()
    with open_run(tmp_path / "run") as run, open_run(tmp_path / "run") as frozen:
        frozen.freeze()
        replayed, replayed_frozen, end = run.steps(), None, 48
        seen = []
        for place, row in enumerate(replayed):
            seen.append(row)
            if place % 4 == 0 and end < 400:
                append_all(writer, rows[end : end + 30])
                end = min(400, end + 30)
                writer.flush()
                time.sleep(0.02)  # for the compaction
            if place == 10:
                replayed_frozen = bits(frozen.steps())
        assert bits(seen) == replayed_frozen == bits(frozen.steps()) == bits(rows[:48])
        assert frozen.last_step == 47
        assert len(frozen.series("gradient/norm", "blocks.3.weight")) == 5
        assert len(run.series("train/loss")) == end
        assert bits(frozen.freeze().steps()) == bits(rows[:end])


def test_a_resume_that_deletes_nothing_does_not_disturb_a_reader(tmp_path, write, small_chunks):
    rows = training(200)
    writer = write()
    append_all(writer, rows[:100])
    writer.close()
    with open_run(tmp_path / "run") as run:
        run.freeze()
        replayed = run.steps()
        seen = [next(replayed)]
        for first in (100, 150):
            writer = write(resume_at=first)
            append_all(writer, rows[first : first + 50])
            writer.close()
            seen += [next(replayed) for _ in range(20)]
        assert bits([*seen, *replayed]) == bits(rows[:100])
        assert run.num_steps == 100
        write(resume_at=100).close()
        with pytest.raises(ResumedError, match="another process resumed it"):
            run.names()


def test_metrics_and_records_that_came_later_are_not_in_a_frozen_run(tmp_path, write):
    writer = write()
    append_all(writer, training(5, every=100, first=1))
    writer.event("early")
    writer.flush()
    with open_run(tmp_path / "run") as run:
        run.freeze()
        append_all(writer, training(30, first=10))
        writer.event("late")
        writer.close()
        assert run.names() == ["train/loss"]
        assert [event.kind for event in run.events()] == ["early"]
        assert run.end is None
        assert run.updated == 1e9 + 5
        with pytest.raises(KeyError, match="no metric 'gradient/norm'"):
            run.series("gradient/norm", "blocks.3.weight")


def test_a_run_that_is_deleted_while_it_is_read_is_read_to_its_end(tmp_path, write, small_chunks):
    rows = training(200)
    writer = write()
    append_all(writer, rows)
    writer.flush()
    with open_run(tmp_path / "run") as run:
        replayed = run.steps()
        first = next(replayed)
        while (tmp_path / "run").exists():  # its writer may put a file there meanwhile
            shutil.rmtree(tmp_path / "run", ignore_errors=True)
        assert bits([first, *replayed]) == bits(rows)
    with pytest.raises(RunError, match=r"there is no .*run; name the directory of a run"):
        open_run(tmp_path / "run")


def test_a_slow_reader_does_not_let_the_log_grow(tmp_path, write, monkeypatch):
    monkeypatch.setattr("forewarn.store.database._CHECKPOINT_BYTES", 1 << 20)
    writer = write()
    wide = tuple(f"layer{i}" for i in range(2000))
    rows = [(step, [_block(step, wide)]) for step in range(3000)]
    append_all(writer, rows[:300])
    writer.flush()
    with open_run(tmp_path / "run") as run:
        run.freeze()
        replayed = run.steps()
        next(replayed)  # and then it is left lying
        for first in range(300, 3000, 100):
            append_all(writer, rows[first : first + 100])
            writer.flush()
        assert (tmp_path / "run" / "run.db-wal").stat().st_size < 12 << 20  # 24 MB were written, twice
        assert sum(1 for _ in replayed) == 299


def _block(step: int, scopes: tuple[str, ...]) -> Block:
    return Block(step, 0.0, "gradient/norm", scopes, np.full(len(scopes), step, np.float32))
