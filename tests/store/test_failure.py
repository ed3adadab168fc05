"""Nothing that happens to the disk reaches the training."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
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


@pytest.fixture
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forewarn.store.background._RETRY_SECONDS", 0.05)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EMFILE, errno.EACCES, errno.EROFS, errno.ENOENT, errno.EIO])
@pytest.mark.parametrize("place", ["forewarn.store.writer.Path.mkdir", "forewarn.files.os.fsync"])
def test_a_run_that_could_not_be_begun_is_recorded_from_its_first_step_once_it_can_be(
    tmp_path, write, monkeypatch, quick_retries, number, place
):
    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    rows = training(400)
    with monkeypatch.context() as patch:
        patch.setattr(place, refuse)
        writer = write()
        append_all(writer, rows[:300])
        writer.event("probe_failed", why="it broke")
        writer.flush()
        assert "this run is not recorded until" in writer.failure
        assert os.strerror(number).lower() in writer.failure.lower()
    _wait_until_well(writer)
    append_all(writer, rows[300:])
    writer.close()
    with open_run(tmp_path / "run") as run:
        check_against(run, rows)
        assert [event.kind for event in run.events()] == ["probe_failed", "store_recovered", "end"]
        assert run.events()[1].data["dropped_rows"] == 0


def _no_room(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_run_that_could_not_be_resumed_goes_on_once_it_can(tmp_path, write, monkeypatch, quick_retries):
    rows = training(60, every=3)
    writer = write()
    append_all(writer, rows[:40])
    writer.close()

    for place in ("forewarn.store.writer.truncate", "forewarn.store.writer.write_manifest"):
        with monkeypatch.context() as patch:
            patch.setattr(place, _no_room)
            writer = write(resume_at=20)
            append_all(writer, rows[20:40])
            assert "this run is not recorded until it can" in writer.failure
        _wait_until_well(writer)
        append_all(writer, rows[40:])
        writer.close()
        with open_run(tmp_path / "run") as run:
            check_against(run, rows)


def test_a_run_that_somebody_else_resumed_meanwhile_is_left_to_them(tmp_path, write, monkeypatch, quick_retries):
    rows = training(40)
    writer = write()
    append_all(writer, rows[:20])
    writer.close()

    with monkeypatch.context() as patch:
        patch.setattr("forewarn.store.writer.truncate", _no_room)
        patch.setattr("forewarn.store.background._RETRY_SECONDS", 1.0)
        late = write(resume_at=10)
        append_all(late, rows[10:15])
    other = write(resume_at=20)
    append_all(other, rows[20:])
    other.flush()
    _wait_for(lambda: "resumed by another process" in (late.failure or ""))
    late.close()
    other.close()
    with open_run(tmp_path / "run") as run:
        check_against(run, rows)


def test_a_directory_that_somebody_else_took_meanwhile_is_left_to_them(tmp_path, write, monkeypatch, quick_retries):
    with monkeypatch.context() as patch:
        patch.setattr("forewarn.store.writer.Path.mkdir", _no_room)
        patch.setattr("forewarn.store.background._RETRY_SECONDS", 1.0)
        late = write()
        append_all(late, training(5, first=100))
    other = write()
    append_all(other, training(5))
    _wait_for(lambda: "by another process: this process records nothing more" in (late.failure or ""))
    late.close()
    other.close()
    with open_run(tmp_path / "run") as run:
        check_against(run, training(5))


def test_rows_that_do_not_fit_in_memory_before_a_run_begins_are_counted(tmp_path, write, monkeypatch, quick_retries):
    monkeypatch.setattr("forewarn.store.background._MOST_BYTES", 20 * 8000)
    rows = _wide(60)
    with monkeypatch.context() as patch:
        patch.setattr("forewarn.store.writer.Path.mkdir", _no_room)
        writer = write()
        append_all(writer, rows)
    _wait_until_well(writer)
    writer.close()
    with open_run(tmp_path / "run") as run:
        assert 15 < run.num_steps < 60
        check_against(run, rows[: run.num_steps])
        [recovered] = [event for event in run.events() if event.kind == "store_recovered"]
        assert recovered.data["dropped_rows"] == 60 - run.num_steps


def test_a_path_that_is_a_file_is_refused(tmp_path, write):
    (tmp_path / "run").write_text("")
    with pytest.raises(NotADirectoryError, match="run is a file; a run needs a directory, so name another path"):
        write()


def test_a_link_to_nothing_is_not_taken_for_a_run(tmp_path, write):
    (tmp_path / "run").symlink_to(tmp_path / "unmounted")
    with pytest.raises(NotADirectoryError, match="run is a link to nothing; a run needs a directory"):
        write()


def test_the_run_may_be_removed_while_it_is_written(tmp_path, write):
    writer, rows = write(), training(30)
    append_all(writer, rows[:10])
    writer.flush()
    while (tmp_path / "run").exists():  # the writer may put a file there meanwhile
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
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


def test_a_disk_without_inodes_is_said_to_be_so_and_used_once_it_has_some(tmp_path, write, quick_retries):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m,nr_inodes=12", "tmpfs", str(disk)], capture_output=True
    ).returncode:
        pytest.skip("mounting is not permitted here; errors of the same number stand in for it")
    try:
        rows = training(100)
        for num_free in (0, 2):  # none for the directory; one for run.db, and none for SQLite's own files
            ballast = []
            while len(ballast) < 12:
                try:
                    ballast.append(disk / f"ballast{len(ballast)}")
                    ballast[-1].touch()
                except OSError:
                    ballast.pop()
                    break
            for file in ballast[:num_free]:
                file.unlink()
            writer = write(disk / f"run{num_free}")
            append_all(writer, rows[:50])
            assert "is out of inodes (df -i): this run is not recorded until files are deleted" in writer.failure
            for file in ballast[num_free:]:
                file.unlink()
            _wait_until_well(writer)
            append_all(writer, rows[50:])
            writer.close()
            with open_run(disk / f"run{num_free}") as run:
                check_against(run, rows)
            shutil.rmtree(disk / f"run{num_free}")
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


_WITHOUT_DESCRIPTORS = """
import os, sys, time
import numpy as np
from forewarn.store import RunWriter
from forewarn.types import Block, RunInfo
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
held = []
try:
    while True:
        held.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    pass
for number in range(int(sys.argv[2])):
    os.close(held.pop())
from forewarn.store import background
background._RETRY_SECONDS = 0.05
writer = RunWriter(sys.argv[1], info=RunInfo(), config={})
for step in range(20):
    writer.append(step, [Block(step, 0.0, "train/loss", ("",), np.float32([step]))])
print(writer.failure)
for file in held:
    os.close(file)
while writer.failure is not None:
    time.sleep(0.01)
writer.close()
"""


@pytest.mark.parametrize("num_free", [0, 1, 2, 3])
def test_a_process_without_file_descriptors_records_once_it_has_some(tmp_path, num_free):
    arguments = [sys.executable, "-c", _WITHOUT_DESCRIPTORS, str(tmp_path / "run"), str(num_free)]
    said = subprocess.run(arguments, check=True, timeout=60, capture_output=True, text=True)
    assert not said.stderr
    assert num_free or "this run is not recorded until" in said.stdout
    with open_run(tmp_path / "run") as run:
        assert run.series("train/loss").values.tolist() == list(range(20))


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
    _wait_for(lambda: writer.failure is None)


def _wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.skipif(sys.platform != "linux", reason="inotify")
def test_a_writer_that_closes_leaves_no_moment_in_which_a_kill_makes_the_run_unreadable(tmp_path, write):
    """A journal on the disk, while it is there, is half a transaction that a reader must not undo at once."""
    writer = write(tmp_path / "run")
    append_all(writer, training(10))
    writer.flush()
    libc = ctypes.CDLL(None)
    events = libc.inotify_init1(os.O_NONBLOCK)
    in_create = 0x100
    assert libc.inotify_add_watch(events, os.fsencode(tmp_path / "run"), in_create) > 0
    (tmp_path / "run" / "run.db-seen").touch()
    writer.close()
    created = os.read(events, 1 << 16)
    os.close(events)
    assert b"run.db-seen" in created
    assert b"-journal" not in created
    assert not (tmp_path / "run" / "run.db-wal").exists()
