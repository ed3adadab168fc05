"""`forewarn ls`."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from forewarn.config import Config
from forewarn.store import RunWriter, open_run
from forewarn.types import Alert, AlertState, Finding, Severity
from tests.cli.conftest import FACTS, Said, block, falling, write_run

Call = Callable[..., Said]


def line_of(said: Said, name: str) -> str:
    (line,) = (line for line in said.out.splitlines() if f"/{name} " in line)
    return line


@pytest.mark.parametrize(
    ("end", "state"),
    [
        ("completed", "completed"),
        (None, "running"),
        ("ValueError: bad", "failed"),
        ("KeyboardInterrupt", "interrupted"),
    ],
)
def test_the_state_follows_from_how_the_run_ended(forewarn: Call, tmp_path: Path, end: str | None, state: str) -> None:
    write_run(tmp_path / "runs" / "one", falling(50), end=end)
    assert f" {state} " in line_of(forewarn("ls", tmp_path / "runs"), "one")


def test_a_run_that_fell_silent_without_an_end_was_interrupted(forewarn: Call, tmp_path: Path) -> None:
    long_ago = time.time() - 7200
    writer = RunWriter(tmp_path / "runs/old", info=dataclasses.replace(FACTS, started=long_ago), config={})
    writer.append(0, [dataclasses.replace(block(0, "train/loss", 1.5), time=long_ago)])
    writer.flush()
    line = line_of(forewarn("ls", tmp_path / "runs"), "old")
    writer.close()
    assert " interrupted " in line
    assert "2 hours" in line


def test_each_run_is_a_line_with_its_numbers(forewarn: Call, healthy: Path, tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "runs/sick", info=FACTS, config=Config().to_dict())
    writer.append(0, [block(0, "train/loss", 2.5)])
    finding = Finding("L102", "", 0, Severity.CRITICAL, 9.0, 2.0)
    alert = Alert("L102", "loss-spike", "", Severity.CRITICAL, AlertState.FIRING, 0, 0, 0, finding)
    writer.record(0, alerts=[alert])
    writer.close()
    said = forewarn("ls", tmp_path / "runs")
    assert said.code == 0
    assert "[b]Net\\x07" in line_of(said, "sick")
    assert "1 critical" in line_of(said, "sick")
    assert " 1 " in line_of(said, "sick")
    assert " 2.5 " in line_of(said, "sick")
    with open_run(healthy) as run:
        assert f" {run.num_steps} " in line_of(said, "healthy")
    assert "none" in line_of(said, "healthy")


def test_a_damaged_run_does_not_hide_the_others(forewarn: Call, healthy: Path, lost: Path) -> None:
    (lost / "run.json").write_text("{")
    said = forewarn("ls", healthy.parent)
    assert said.code == 0
    assert "completed" in line_of(said, "healthy")
    assert f"unreadable: {lost}" in said.out


def test_the_default_is_runs_here(
    forewarn: Call, healthy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "runs/healthy" in forewarn("ls").out


def test_no_directory_and_no_runs_say_how_to_make_one(forewarn: Call, tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        said = forewarn("ls", path)
        assert said.code == 3
        assert "forewarn demo" in said.err


def test_a_long_name_leaves_room_for_the_rest(forewarn: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    write_run(Path("runs") / ("long" * 20), falling(50))
    lines = forewarn("ls").out.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].split() == ["run", "steps", "last", "loss", "state", "alerts", "age"]
    assert "completed  none" in lines[1]
    assert "…" not in lines[1]


def test_no_database_is_opened_for_a_run_whose_summary_is_current(
    forewarn: Call, healthy: Path, lost: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = forewarn("ls", healthy.parent).out

    def refused(*_: object, **__: object) -> None:
        raise AssertionError("a database was opened")

    monkeypatch.setattr("sqlite3.connect", refused)
    assert forewarn("ls", healthy.parent).out == before
    assert "completed" in line_of(forewarn("ls", healthy.parent), "healthy")


def test_a_run_without_a_summary_is_listed_alike(forewarn: Call, healthy: Path, lost: Path) -> None:
    before = sorted(forewarn("ls", healthy.parent).out.splitlines())
    for run in (healthy, lost):
        (run / "summary.json").unlink()
    assert sorted(forewarn("ls", healthy.parent).out.splitlines()) == before
