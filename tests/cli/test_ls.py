"""`forewarn ls`."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.cells import cell_len

from forewarn.config import Config
from forewarn.store import RunWriter, open_run
from forewarn.types import Alert, AlertState, Finding, Severity
from forewarn.views.wording import literal
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


@pytest.mark.parametrize(("seconds", "state", "age"), [(400, "stalled", "6 minutes"), (7200, "interrupted", "2 hours")])
def test_a_run_that_fell_silent_without_an_end_is_stalled_and_then_interrupted(
    forewarn: Call, tmp_path: Path, seconds: int, state: str, age: str
) -> None:
    long_ago = time.time() - seconds
    writer = RunWriter(tmp_path / "runs/old", info=dataclasses.replace(FACTS, started=long_ago), config={})
    writer.append(0, [dataclasses.replace(block(0, "train/loss", 1.5), time=long_ago)])
    writer.flush()
    line = line_of(forewarn("ls", tmp_path / "runs"), "old")
    (row,) = json.loads(forewarn("ls", tmp_path / "runs", "--json").out)
    writer.close()
    assert f" {state} " in line
    assert age in line
    assert row["state"] == state


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


LONG_NAMES = {
    "a sweep": "2024-05-01_gpt2-small_lr3e-4_bs64_wd0.1_warmup500_seed3",
    "wider than the terminal": "long" * 30,
    "wide characters": "模型训练" * 8,
    "hostile": "x[red]y[/red]\x1b]0;y\x07\x9b31m\u202e\r\n",
    "markup and blanks": "  [bold]a b[/bold]  " * 2,
}


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("kind", LONG_NAMES)
def test_a_long_name_is_never_split_and_leaves_room_for_the_rest(
    forewarn: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.chdir(tmp_path)
    path = Path("runs") / LONG_NAMES[kind]
    write_run(Path("runs/short"), falling(50))
    write_run(path, falling(50))
    lines = forewarn("ls").out.splitlines()
    assert max(map(cell_len, lines)) <= columns
    assert lines[0].split()[:1] + lines[0].split()[-6:] == ["run", "steps", "last", "loss", "state", "alerts", "age"]
    assert sum(" completed  none" in line for line in lines) == 2
    name = literal(str(path)).rstrip()  # blanks at the end of a line are left out
    if cell_len(name) <= columns:
        assert sum(line.startswith(name) for line in lines) == 1
    else:
        (cut,) = (line for line in lines if "…" in line)
        start, _, end = cut.partition("…")
        assert cell_len(cut) >= columns - 3
        assert name.startswith(start.rstrip())
        assert name.endswith(end.lstrip())


def test_many_alerts_of_every_severity_fit_in(forewarn: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    writer = RunWriter(Path("runs/an-experiment"), info=FACTS, config=Config().to_dict())
    writer.append(123_456, [block(123_456, "train/loss", 1.23e-5)])
    finding = Finding("L102", "", 0, Severity.CRITICAL, 9.0, 2.0)
    for number in range(90):
        severity = list(Severity)[number % 3]
        writer.record(0, alerts=[Alert("L102", "x", str(number), severity, AlertState.FIRING, 0, 0, 0, finding)])
    writer.close()
    for columns, words in ((80, "30 critical + 60"), (120, "30 critical, 30 warnings, 30 notes")):
        monkeypatch.setenv("COLUMNS", str(columns))
        said = forewarn("ls")
        assert words in line_of(said, "an-experiment")
        assert "1.23e-5" in line_of(said, "an-experiment")
        assert max(map(len, said.out.splitlines())) <= columns


def test_json_holds_every_run_with_whole_names_and_the_reason_where_one_cannot_be_read(
    forewarn: Call, healthy: Path, lost: Path
) -> None:
    long = write_run(healthy.parent / ("x[red]\x1b" * 20), falling(20), end="ValueError: bad")
    (lost / "run.json").write_text("{")
    said = forewarn("ls", healthy.parent, "--json")
    assert said.code == 0
    runs = {run.pop("path"): run for run in json.loads(said.out)}
    assert list(runs)[-1] == str(lost)
    assert str(lost) in runs[str(lost)]["error"]
    assert runs[str(long)]["state"] == "failed"
    assert runs[str(long)]["end"] == "ValueError: bad"
    with open_run(healthy) as run:
        assert runs[str(healthy)] == {
            "model": FACTS.model,
            "num_steps": run.num_steps,
            "last_step": run.last_step,
            "last_loss": pytest.approx(float(run.series("train/loss").values[-1])),
            "state": "completed",
            "end": "completed",
            "alerts": {},
            "updated": run.updated,
        }


def test_json_of_a_directory_without_runs_is_an_empty_list(forewarn: Call, tmp_path: Path) -> None:
    assert forewarn("ls", tmp_path, "--json").out == "[]\n"
    assert forewarn("ls", tmp_path / "none", "--json").code == 3


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
