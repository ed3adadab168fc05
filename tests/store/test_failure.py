"""Nothing that happens to the disk reaches the training."""

from __future__ import annotations

import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from forewarn.store import RunWriter, open_run
from forewarn.types import Block
from tests.store.rows import append_all, check_against, training


def test_a_directory_that_cannot_be_made_is_a_failure_and_not_an_error(tmp_path, write):
    (tmp_path / "file").write_text("")
    writer = write(tmp_path / "file" / "runs" / "run")
    assert "cannot be written" in writer.failure
    assert "this run is not recorded" in writer.failure
    append_all(writer, training(10))
    writer.record(3)
    writer.event("probe_failed", why="it broke")
    writer.flush()
    writer.close()


def test_a_read_only_directory_is_a_failure_and_not_an_error(tmp_path, write, monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("forewarn.store.database.Path.open", refuse)
    writer = write()
    assert "Permission denied" in writer.failure
    append_all(writer, training(10))
    writer.close()


def test_a_run_that_could_not_be_begun_leaves_nothing_behind(tmp_path, write, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("forewarn.files.os.fsync", refuse)
        assert "No space left" in write().failure
    assert list((tmp_path / "run").iterdir()) == []
    assert write().failure is None


def test_a_path_that_is_a_file_is_refused(tmp_path, write):
    (tmp_path / "run").write_text("")
    with pytest.raises(NotADirectoryError, match="run is a file; a run needs a directory, so name another path"):
        write()


def test_the_run_may_be_removed_while_it_is_written(tmp_path, write):
    writer, rows = write(), training(30)
    append_all(writer, rows[:10])
    writer.flush()
    shutil.rmtree(tmp_path / "run")
    append_all(writer, rows[10:])
    writer.flush()
    assert "the database was removed" in writer.failure
    writer.close()
    assert not (tmp_path / "run").exists()


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "disk"
    path.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(path)], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting is not permitted here; the limit of file sizes stands in for it")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


def _wide(num_steps: int) -> list[tuple[int, list[Block]]]:
    scopes = tuple(f"layer{i}" for i in range(2000))
    return [(s, [Block(s, 0.0, "gradient/norm", scopes, np.full(2000, s, np.float32))]) for s in range(num_steps)]


def test_a_full_disk_is_a_failure_and_room_is_used_when_it_comes_back(tiny_disk, write, monkeypatch):
    monkeypatch.setattr("forewarn.store.background._RETRY_SECONDS", 0.05)
    rows = _wide(60)
    ballast = tiny_disk / "ballast"
    ballast.write_bytes(bytes(700_000))
    writer = write(tiny_disk / "run")
    append_all(writer, rows[:5])
    writer.flush()
    assert writer.failure is None
    append_all(writer, rows[5:])
    writer.flush()
    assert writer.failure == f"the disk of {tiny_disk / 'run'} is full: nothing is recorded until there is room"
    with open_run(tiny_disk / "run") as run:
        check_against(run, rows[:5])
    ballast.unlink()
    _wait_until_well(writer)
    writer.flush()
    with open_run(tiny_disk / "run") as run:
        check_against(run, rows)
        assert [one.kind for one in run.events()] == ["store_recovered"]
        assert "is full" in str(run.events()[0].data["why"])
        assert run.events()[0].data["dropped_rows"] == 0


def test_a_disk_that_stays_full_ends_the_run_quietly(tiny_disk, write):
    rows = _wide(200)
    writer = write(tiny_disk / "run")
    append_all(writer, rows)
    writer.close()
    assert "is full" in writer.failure
    with open_run(tiny_disk / "run") as run:
        check_against(run, rows[: run.num_steps])


_LIMITED = """
import resource, sys
import numpy as np
from forewarn.store import RunWriter
from forewarn.types import Block, RunInfo

writer = RunWriter(sys.argv[1], info=RunInfo(), config={})
resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))
scopes = tuple(map(str, range(2000)))
for step in range(100):
    writer.append(step, [Block(step, 0.0, "gradient/norm", scopes, np.full(2000, step, np.float32))])
    if step % 10 == 0:
        writer.flush()
print(writer.failure)
writer.close()
"""


def test_a_file_that_may_not_grow_is_a_failure_and_not_an_error(tmp_path):
    told = subprocess.run(
        [sys.executable, "-c", _LIMITED, str(tmp_path / "run")], check=True, timeout=60, capture_output=True, text=True
    )
    assert "nothing is recorded until" in told.stdout
    assert not told.stderr
    with open_run(tmp_path / "run") as run:
        steps = run.series("gradient/norm", "7").values
        assert 0 < len(steps) < 100
        assert np.array_equal(steps, np.arange(len(steps)))


def test_a_disk_that_is_too_slow_costs_steps_and_not_memory(tmp_path, write, monkeypatch):
    monkeypatch.setattr("forewarn.store.background._MOST_BYTES", 20 * 8000)
    writer = write()
    slow = _HeldUp(writer)
    rows = _wide(60)
    append_all(writer, rows)
    assert writer.failure == f"the disk of {tmp_path / 'run'} is too slow: some steps are not recorded"
    slow.release()
    _wait_until_well(writer)
    writer.close()
    with open_run(tmp_path / "run") as run:
        assert 15 < run.num_steps < 60
        check_against(run, rows[: run.num_steps])
        [recovered] = [one for one in run.events() if one.kind == "store_recovered"]
        assert recovered.data["dropped_rows"] == 60 - run.num_steps


class _HeldUp:
    """Another process that holds the database's lock for as long as it likes."""

    def __init__(self, writer: RunWriter) -> None:
        writer.flush()
        self._connection = sqlite3.connect(writer.path / "run.db", isolation_level=None)
        self._connection.execute("BEGIN IMMEDIATE")

    def release(self) -> None:
        self._connection.execute("ROLLBACK")
        self._connection.close()


def _wait_until_well(writer: RunWriter) -> None:
    end = time.monotonic() + 20
    while writer.failure is not None:
        assert time.monotonic() < end
        time.sleep(0.01)
