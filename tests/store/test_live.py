"""A run is read by others while it is written, and survives its writer."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time

import numpy as np
import pytest

from forewarn.store import RunError, open_run
from forewarn.types import Block
from tests.store.rows import append_all, check_against, training

_WRITE_FOREVER = """
import itertools, sys, time
import numpy as np
from forewarn.store import RunWriter
from forewarn.types import Block, RunInfo

writer = RunWriter(sys.argv[1], info=RunInfo(), config={})
scopes = tuple(f"layer{i}" for i in range(200))
for step in itertools.count():
    now = time.time()
    writer.append(step, [
        Block(step, now, "train/loss", ("",), np.float32([step])),
        Block(step, now, "gradient/norm", scopes, np.full(200, step, np.float32)),
    ])
    time.sleep(0.0005)
"""

_READ_UNTIL_THE_END = """
import sys, time
import numpy as np
from forewarn.store import open_run

num_reads = 0
with open_run(sys.argv[1]) as run:
    while True:
        ended = run.end is not None
        if "gradient/norm" in run.names():
            for name, scope in (("train/loss", ""), ("gradient/norm", "layer7")):
                series = run.series(name, scope)
                assert np.array_equal(series.steps, np.arange(len(series))), "rows are missing"
                assert np.array_equal(series.values, series.steps), "values are out of place"
            num_reads += 1
        if ended:
            break
    assert sum(1 for _ in run.steps()) == len(series)
    print(num_reads, len(series))
"""


def test_another_process_reads_a_consistent_run_while_it_is_written_and_compacted(tmp_path, write):
    writer = write()
    scopes = tuple(f"layer{i}" for i in range(200))
    reader = subprocess.Popen(
        [sys.executable, "-c", _READ_UNTIL_THE_END, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True
    )
    end = time.monotonic() + 2
    step = 0
    while time.monotonic() < end or step < 1000:
        values = np.full(200, step, np.float32)
        loss = Block(step, 0.0, "train/loss", ("",), values[:1])
        writer.append(step, [loss, Block(step, 0.0, "gradient/norm", scopes, values)])
        step += 1
        time.sleep(0.0005)
    writer.close()
    told, _ = reader.communicate(timeout=60)
    assert reader.returncode == 0
    num_reads, num_steps = map(int, told.split())
    assert num_steps == step
    assert num_reads > 2
    assert writer.failure is None


def test_a_killed_writer_loses_about_a_second_and_nothing_else(tmp_path, write):
    path = tmp_path / "run"
    process = subprocess.Popen([sys.executable, "-c", _WRITE_FOREVER, str(path)])
    _wait_for(lambda: (path / "run.json").exists())
    time.sleep(2)
    process.send_signal(signal.SIGKILL)
    killed = time.time()
    process.wait()
    with open_run(path) as run:
        loss = run.series("train/loss")
        assert np.array_equal(loss.values, np.arange(len(loss)))
        assert np.array_equal(run.series("gradient/norm", "layer199").values, loss.values)
        assert run.updated is not None
        assert killed - run.updated < 2  # one second, and one for a machine that is busy
        assert run.end is None
        assert run.last_step == len(loss) - 1
    write(path, resume_at=10).close()
    with open_run(path) as run:
        assert run.num_steps == 10


def test_a_writer_killed_amid_a_transaction_on_a_network_file_system_leaves_what_was_before(
    tmp_path, write, monkeypatch
):
    monkeypatch.setattr("forewarn.store.mounts._mounts_here", lambda: [("/", "nfs4")])
    rows = training(600)
    writer = write()
    append_all(writer, rows)
    writer.close()
    connection = sqlite3.connect(tmp_path / "run" / "run.db", isolation_level=None)
    connection.execute("PRAGMA cache_size = 1")  # changes reach the file before they are committed
    connection.execute("BEGIN")
    connection.execute("UPDATE bands SET body = zeroblob(length(body))")
    shutil.copytree(tmp_path / "run", tmp_path / "killed")
    connection.close()
    journal = tmp_path / "killed" / "run.db-journal"
    assert journal.stat().st_size
    with pytest.raises(RunError, match="its writer was killed; try again in a minute"):
        open_run(tmp_path / "killed")
    os.utime(journal, (time.time() - 60, time.time() - 60))
    with open_run(tmp_path / "killed") as run:
        check_against(run, rows)


def test_a_writer_that_nobody_closed_is_written_at_the_end_of_the_process(tmp_path):
    script = _WRITE_FOREVER.replace("itertools.count()", "range(20)")
    subprocess.run([sys.executable, "-W", "error", "-c", script, str(tmp_path / "run")], check=True, timeout=60)
    with open_run(tmp_path / "run") as run:
        assert run.num_steps == 20
        assert run.end is not None
        assert run.end[0] == "not closed"
    assert sorted(os.listdir(tmp_path / "run")) == ["run.db", "run.json", "summary.json"]


_FORK = """
import os, sys
import numpy as np
from forewarn.store import RunWriter
from forewarn.types import Block, RunInfo

def block(step):
    return Block(step, 0.0, "train/loss", ("",), np.float32([step]))

writer = RunWriter(sys.argv[1], info=RunInfo(), config={})
writer.append(0, [block(0)])
for leave in (os._exit, sys.exit):
    child = os.fork()
    if child == 0:
        for step in range(1000, 1300):
            writer.append(step, [block(step)])
        writer.event("from a child")
        writer.flush()
        if leave is os._exit:
            writer.close()
        leave(0)
    assert os.waitpid(child, 0)[1] == 0
    writer.append(1, [block(1)])
writer.close()
"""


def test_a_forked_child_writes_nothing_and_harms_nothing(tmp_path):
    subprocess.run([sys.executable, "-c", _FORK, str(tmp_path / "run")], check=True, timeout=60)
    with open_run(tmp_path / "run") as run:
        assert run.series("train/loss").steps.tolist() == [0, 1, 1]
        assert [one.kind for one in run.events()] == ["end"]


def _wait_for(condition) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)
