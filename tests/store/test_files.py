"""Files that are written follow the umask and no planted link; files that are read are regular ones of a fair size."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest
import torch

from forewarn.files import read_regular, replacing
from forewarn.lab.results import ResultDirectory
from forewarn.lab.snapshots import Snapshots
from forewarn.store import RunError, RunWriter, list_runs, open_run
from forewarn.types import RunInfo
from tests.store.hostile import old_journal
from tests.store.rows import append_all, check_against, training


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A file of the user's that nobody may touch."""
    file = tmp_path / "victim"
    file.write_text("precious")
    return file


def _plant(directory: Path, name: str, victim: Path) -> None:
    """A link where the draft of a file will be."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / f"{name}.{os.getpid()}.draft").symlink_to(victim)


def test_a_planted_link_is_not_followed_when_a_run_begins_or_is_resumed(tmp_path, victim, write):
    _plant(tmp_path / "run", "run.json", victim)
    write().close()
    _plant(tmp_path / "run", "run.json", victim)
    write(resume_at=0).close()
    assert victim.read_text() == "precious"
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["run.db", "run.json", "summary.json"]
    open_run(tmp_path / "run").close()


@pytest.mark.parametrize("name", ["run.db", "run.db-wal", "run.db-shm", "run.db-journal"])
def test_a_planted_link_is_not_followed_by_the_database(tmp_path, victim, write, name):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).symlink_to(victim)
    if name == "run.db":
        with pytest.raises(FileExistsError):
            write()
    else:
        assert "it is a link, not a regular file" in write().failure
    assert victim.read_text() == "precious"


def test_a_planted_link_is_not_followed_by_the_trainer(tmp_path, victim):
    model = torch.nn.Linear(2, 1)
    _plant(tmp_path / "results", "model.json", victim)
    ResultDirectory(tmp_path / "results", model).claim()
    _plant(tmp_path / "snapshots", "step-00000001.pt", victim)
    Snapshots(tmp_path / "snapshots", keep=1).save(1, {"step": 1})
    assert victim.read_text() == "precious"
    assert json.loads((tmp_path / "results" / "model.json").read_text())
    assert Snapshots(tmp_path / "snapshots", keep=1).newest() == {"step": 1}


@pytest.mark.parametrize("mask", [0o022, 0o002, 0o077, 0o027])
def test_modes_are_as_the_umask_says(tmp_path, write, mask):
    before = os.umask(mask)
    try:
        writer = write()
        append_all(writer, training(3))
        writer.flush()
        Snapshots(tmp_path / "snapshots", keep=1).save(1, {"step": 1})
        ResultDirectory(tmp_path / "results", torch.nn.Linear(2, 1)).claim()
    finally:
        os.umask(before)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"run.json", "run.db", "run.db-wal", "step-00000001.pt", "model.json"} <= {path.name for path in files}
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o666 & ~mask}


def test_a_draft_that_could_not_be_finished_is_gone_and_the_file_as_before(tmp_path):
    (tmp_path / "file").write_text("before")
    with pytest.raises(TypeError), replacing(tmp_path / "file") as draft:
        draft.writelines([b"half of", "it"])
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "before"


def test_only_regular_files_of_a_fair_size_are_read(tmp_path):
    (tmp_path / "file").write_bytes(b"12345")
    assert read_regular(tmp_path / "file", 5) == b"12345"
    (tmp_path / "link").symlink_to("file")
    assert read_regular(tmp_path / "link", 5) == b"12345"
    with pytest.raises(OSError, match="it is larger than"):
        read_regular(tmp_path / "file", 4)
    os.mkfifo(tmp_path / "fifo")
    for path, reason in (("fifo", "it is a FIFO"), ("/dev/zero", "it is a device"), (".", "it is a directory")):
        with pytest.raises(OSError, match=reason):
            read_regular(tmp_path / path, 5)


def test_a_journal_cannot_make_a_reader_delete_a_file(tmp_path, victim, write):
    """SQLite deletes the file that a journal names at its end when it rolls the journal back."""
    writer = write()
    append_all(writer, training(30))
    writer.close()
    old_journal(tmp_path / "run", os.fsencode(victim))
    with pytest.raises(RunError):
        open_run(tmp_path / "run")
    assert victim.read_text() == "precious"


def test_a_journal_of_a_killed_writer_is_still_rolled_back(tmp_path, write):
    rows = training(30)
    writer = write()
    append_all(writer, rows)
    writer.close()
    old_journal(tmp_path / "run", b"")
    with open_run(tmp_path / "run") as run:
        check_against(run, rows)
    assert not (tmp_path / "run" / "run.db-journal").exists()


@pytest.mark.parametrize("name", ["run.json", "run.db", "run.db-wal", "run.db-journal"])
def test_resuming_does_not_wait_for_a_fifo(tmp_path, write, name):
    write().close()
    (tmp_path / "run" / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / "run" / name)
    if name == "run.json":
        with pytest.raises(RunError, match="it is a FIFO"):
            write(resume_at=0)
    else:
        assert "it is a FIFO" in write(resume_at=0).failure


def test_a_run_reached_through_links_is_read(tmp_path, write):
    rows = training(30)
    writer = write()
    append_all(writer, rows)
    writer.flush()
    linked = tmp_path / "linked"
    linked.mkdir()
    for name in ("run.json", "run.db"):
        (linked / name).symlink_to(tmp_path / "run" / name)
    with open_run(linked) as run:  # its log lies beside the file that the link leads to
        check_against(run, rows)


def test_links_that_lead_in_circles_do_not_hide_a_run(tmp_path, write):
    write(tmp_path / "runs" / "a" / "one").close()
    for number in range(50):
        (tmp_path / "runs" / f"loop{number}").symlink_to(".")
        (tmp_path / "runs" / "a" / f"loop{number}").symlink_to("..")
    assert tmp_path / "runs" / "a" / "one" in list_runs(tmp_path / "runs")


def test_facts_that_could_not_be_read_back_are_not_written(tmp_path):
    info = RunInfo(hyperparameters={"everything": "x" * (17 << 20)})
    writer = RunWriter(tmp_path / "run", info=info, config={})
    assert "run.json would be too large to be read: shorten the hyperparameters" in writer.failure
    writer.close()


def test_a_number_of_thousands_of_digits_comes_back_as_text(tmp_path):
    info = RunInfo(hyperparameters={"seed": 10**4000, "other": 10**100})
    RunWriter(tmp_path / "run", info=info, config={}).close()
    with open_run(tmp_path / "run") as run:
        assert run.info.hyperparameters == {"seed": str(10**4000), "other": 10**100}
