"""Opening a run says what it found, and what to do if that is no run."""

from __future__ import annotations

import json
import math
import os
import shutil
import sqlite3
import subprocess
import threading
from pathlib import Path

import pytest

from forewarn.store import RunError, RunWriter, list_runs, open_run
from forewarn.types import ParameterInfo, RunInfo
from tests.store.rows import LAYERS, append_all, check_against, training


def test_facts_and_config_come_back(tmp_path, write):
    info = RunInfo(
        model="GPT",
        num_parameters=3,
        parameters={"a.weight": ParameterInfo((2, 3), "Linear.weight", "float32", 0, True)},
        blocks=("blocks.0", "blocks.1"),
        groups=({"lr": 0.1, "weight_decay": math.inf},),
        hyperparameters={"dropout": 0.1, "name": "ж", "deep": True},
        started=12.5,
    )
    config = {
        "rules": {"spike": {"factor": 3.0, "limit": math.inf}},
        "views": ["console"],
        "path": Path("a/b"),
        "n": None,
    }
    write(info=info, config=config).close()
    with open_run(tmp_path / "run") as run:
        assert run.info == info
        assert run.config == {**config, "path": "a/b"}
        assert run.journal == "WAL"
    json.loads((tmp_path / "run" / "run.json").read_text(), parse_constant=pytest.fail)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda path: None, "there is no .*run; name the directory of a run"),
        (lambda path: path.write_text(""), "run is a file; name the directory"),
        (lambda path: path.mkdir(), r"run holds no run: run\.json is missing; name the directory of a run"),
    ],
)
def test_a_path_without_a_run_is_refused(tmp_path, make, sentence):
    make(tmp_path / "run")
    with pytest.raises(RunError, match=sentence):
        open_run(tmp_path / "run")


def test_a_directory_above_runs_names_some_of_them(tmp_path, write):
    write(tmp_path / "runs" / "one").close()
    with pytest.raises(RunError, match=r"it has runs below, such as .*runs/one"):
        open_run(tmp_path / "runs")


def test_a_run_that_nobody_closes_is_closed_when_it_is_dropped(tmp_path, write):
    write().close()
    run = open_run(tmp_path / "run")
    connection = run._connection
    del run
    with pytest.raises(sqlite3.ProgrammingError, match="closed database"):
        connection.execute("SELECT 1")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", r"run\.json is not JSON"),
        ("[]", r"run\.json was not written by forewarn"),
        ('{"format": 99}', r"format 99, and this forewarn reads up to 2: .* upgrade with pip install -U forewarn"),
        ('{"format": 1, "facts": {}}', r"run\.json is damaged"),
        ('{"format": 1, "facts": {"parameters": 3}, "config": {}, "journal": "WAL"}', r"run\.json is damaged"),
    ],
)
def test_a_run_json_that_cannot_be_understood_is_refused(tmp_path, write, text, sentence):
    write().close()
    (tmp_path / "run" / "run.json").write_text(text)
    with pytest.raises(RunError, match=sentence):
        open_run(tmp_path / "run")


def test_a_database_that_is_missing_foreign_newer_or_not_one_is_refused(tmp_path, write):
    write().close()
    file = tmp_path / "run" / "run.db"
    connection = sqlite3.connect(file)
    connection.execute("PRAGMA user_version = 7")
    connection.close()
    with pytest.raises(RunError, match=r"run\.db has format 7.*newer version"):
        open_run(tmp_path / "run")
    file.write_bytes(b"something else entirely" * 500)
    with pytest.raises(RunError, match=r"run\.db cannot be opened \(file is not a database\): it is damaged"):
        open_run(tmp_path / "run")
    file.unlink()
    with pytest.raises(RunError, match=r"has a run\.json but no run\.db"):
        open_run(tmp_path / "run")
    connection = sqlite3.connect(file)
    connection.execute("CREATE TABLE mine (x)")
    connection.close()
    with pytest.raises(RunError, match=r"run\.db is a database of another program"):
        open_run(tmp_path / "run")


def test_unknown_metrics_and_scopes_are_refused_with_what_is_close(tmp_path, write):
    writer = write()
    append_all(writer, training(3))
    writer.close()
    with open_run(tmp_path / "run") as run:
        with pytest.raises(KeyError) as caught:
            run.series("gradient/nrom")
        assert str(caught.value) == "there is no metric 'gradient/nrom'; did you mean 'gradient/norm'?"
        with pytest.raises(KeyError, match=r"there is no scope of gradient/norm 'blocks.7.weigth'; did you mean"):
            run.series("gradient/norm", "blocks.7.weigth")
        with pytest.raises(KeyError, match="there is no metric 'loss'; did you mean 'train/loss'"):
            run.scopes("loss")
        assert run.scopes("gradient/norm") == LAYERS


@pytest.mark.parametrize("ended", ["closed", "closed while it was read", "not closed"])
def test_a_run_on_a_read_only_disk_can_be_read(tmp_path, write, ended):
    rows = training(20)
    writer = write()
    append_all(writer, rows)
    writer.flush()
    disk = tmp_path / "disk"
    if ended == "closed while it was read":
        with open_run(tmp_path / "run") as run:
            run.names()
            writer.close()
            shutil.copytree(tmp_path / "run", disk, ignore=shutil.ignore_patterns("*-shm", "*-wal"))
    else:
        if ended == "closed":
            writer.close()
        shutil.copytree(tmp_path / "run", disk)
    mounted = subprocess.run(["mount", "--bind", "-o", "ro", str(disk), str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting is not permitted here")
    try:
        with pytest.raises(OSError, match="Read-only"):
            (disk / "file").touch()
        with open_run(disk) as run:
            check_against(run, rows)
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def test_an_unclosed_log_on_a_read_only_disk_is_not_passed_over(tmp_path, write):
    writer = write()
    append_all(writer, training(20))
    writer.flush()
    disk = tmp_path / "disk"
    shutil.copytree(tmp_path / "run", disk, ignore=shutil.ignore_patterns("*-shm"))
    if subprocess.run(["mount", "--bind", "-o", "ro", str(disk), str(disk)], capture_output=True).returncode:
        pytest.skip("mounting is not permitted here")
    try:
        with pytest.raises(RunError, match="the run was not closed and is read-only; copy its directory"):
            open_run(disk)
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def test_a_run_belongs_to_the_thread_that_opened_it(tmp_path, write):
    write().close()
    errors = []

    def read() -> None:
        try:
            run.names()
        except sqlite3.ProgrammingError as error:
            errors.append(str(error))

    with open_run(tmp_path / "run") as run:
        thread = threading.Thread(target=read)
        thread.start()
        thread.join()
    assert "thread" in errors[0]


def test_runs_are_listed_newest_first_and_not_too_deep(tmp_path, write):
    for age, name in enumerate(["new", "group/middle", "group/deep/er/old", ".hidden/run", "a/b/c/d/too/deep"]):
        write(tmp_path / name).close()
        for file in (tmp_path / name).iterdir():
            os.utime(file, (1e9 - age, 1e9 - age))
    (tmp_path / "empty").mkdir()
    assert list_runs(tmp_path) == [tmp_path / "new", tmp_path / "group/middle", tmp_path / "group/deep/er/old"]
    assert list_runs(str(tmp_path / "new")) == [tmp_path / "new"]
    assert list_runs(tmp_path / "missing") == []


@pytest.mark.parametrize(("num_tensors", "page_bytes"), [(0, 4096), (64, 4096), (148, 16384), (1000, 65536)])
def test_a_run_of_many_tensors_has_large_pages_and_one_of_few_stays_small(tmp_path, num_tensors, page_bytes):
    each = ParameterInfo(shape=(2,), kind="Linear.weight", dtype="float32", group=0, trainable=True)
    info = RunInfo(parameters={str(at): each for at in range(num_tensors)})
    RunWriter(tmp_path / "run", info=info, config={}).close()
    connection = sqlite3.connect(tmp_path / "run" / "run.db")
    assert connection.execute("PRAGMA page_size").fetchone() == (page_bytes,)
    connection.close()
