"""A resumed run goes on where it was cut off, without a seam."""

from __future__ import annotations

import sqlite3

import numpy as np
import pytest

from forewarn.store import RunError, RunWriter, open_run
from forewarn.types import Action, Alert, AlertState, Block, Finding, RunInfo, Severity
from tests.store.rows import append_all, check_against, training


@pytest.mark.parametrize("cut", [0, 1, 255, 256, 300, 699, 700, 5000])
@pytest.mark.parametrize("closed", [True, False])
def test_a_resumed_run_has_no_seam(tmp_path, write, cut, closed):
    rows = training(700)
    before = write()
    append_all(before, rows)
    before.flush()
    if closed:
        before.close()
    after = write(resume_at=cut)
    with open_run(tmp_path / "run") as run:
        check_against(run, rows[:cut])
        assert run.last_step == (min(cut, 700) - 1 if cut else None)
        assert run.end is None
        news = training(300, first=cut)
        append_all(after, news)
        after.close("completed")
        check_against(run, rows[:cut] + news)
        assert run.end is not None
    assert after.failure is None


@pytest.mark.usefixtures("small_chunks")
def test_the_cut_may_lie_inside_merged_chunks(tmp_path, write):
    rows = training(300, every=7)
    writer = write()
    append_all(writer, rows)
    writer.close()
    for cut in (290, 211, 137, 64, 6):
        writer = write(resume_at=cut)
        append_all(writer, rows[cut : cut + 5])
        writer.close()
        with open_run(tmp_path / "run") as run:
            check_against(run, rows[: cut + 5])


@pytest.mark.usefixtures("small_chunks")
def test_what_was_logged_late_for_an_earlier_step_is_kept(tmp_path, write):
    late = [(3, [Block(3, 7.0, "eval/loss", ("",), np.float32([0.5]))])]
    rows = training(100)
    writer = write()
    append_all(writer, rows[:60] + late + rows[60:])
    writer.close()
    write(resume_at=40).close()
    with open_run(tmp_path / "run") as run:
        check_against(run, rows[:40] + late)


def test_names_that_came_after_the_cut_are_gone(tmp_path, write):
    writer = write()
    append_all(writer, training(20))
    writer.append(20, [Block(20, 0.0, "eval/loss", ("valid",), np.float32([0.5]))])
    writer.close()
    write(resume_at=20).close()
    with open_run(tmp_path / "run") as run:
        assert run.names() == ["gradient/norm", "train/loss"]


def test_findings_alerts_and_actions_from_the_cut_on_are_gone_and_older_states_are_back(tmp_path, write):
    def finding(step: int) -> Finding:
        return Finding("L102", "", step, Severity.WARNING, 9.0, 3.0)

    def alert(state: AlertState, last: int) -> Alert:
        return Alert("L102", "loss-spike", "", Severity.WARNING, state, 5, None, last, finding(5))

    writer = write()
    writer.record(5, findings=[finding(5)], alerts=[alert(AlertState.PENDING, 5)])
    writer.record(
        8, findings=[finding(8)], alerts=[alert(AlertState.FIRING, 8)], actions=[Action(8, "L102", "", "skip")]
    )
    writer.event("probe_failed", why="it broke")
    writer.close()
    with open_run(tmp_path / "run") as run:
        assert [one.state for one in run.alerts()] == [AlertState.FIRING]
    write(resume_at=8).close()
    with open_run(tmp_path / "run") as run:
        assert run.findings() == [finding(5)]
        assert run.alerts() == [alert(AlertState.PENDING, 5)]
        assert run.actions() == []
        assert [one.kind for one in run.events()] == ["probe_failed", "end", "resume", "end"]


def test_the_facts_of_the_resumed_run_replace_the_old_ones_but_not_its_beginning(tmp_path, write):
    write(info=RunInfo(model="GPT", started=100.0), config={"every": 1}).close()
    write(info=RunInfo(model="GPT2", started=200.0), config={"every": 5}, resume_at=3).close()
    with open_run(tmp_path / "run") as run:
        assert run.info == RunInfo(model="GPT2", started=100.0)
        assert run.config == {"every": 5}


def test_the_process_that_was_left_behind_stops_writing(tmp_path, write):
    old, rows = write(), training(30)
    append_all(old, rows[:20])
    old.flush()
    new = write(resume_at=10)
    append_all(old, rows[20:])
    old.flush()
    assert "resumed by another process" in old.failure
    append_all(new, rows[10:15])
    new.close()
    old.close()
    with open_run(tmp_path / "run") as run:
        check_against(run, rows[:15])


def test_replaying_a_run_that_is_resumed_meanwhile_says_so(tmp_path, write, small_chunks):
    writer = write()
    append_all(writer, training(100))
    writer.flush()
    with open_run(tmp_path / "run") as run:
        steps = run.steps()
        next(steps)
        write(resume_at=50)
        with pytest.raises(RunError, match="another process resumed it"):
            list(steps)


def test_a_run_that_is_not_there_cannot_be_resumed(tmp_path):
    with pytest.raises(RunError, match="holds no run to resume"):
        RunWriter(tmp_path / "none", info=RunInfo(), config={}, resume_at=5)


def test_a_damaged_run_cannot_be_resumed(tmp_path, write):
    writer = write()
    append_all(writer, training(300))
    writer.close()
    connection = sqlite3.connect(tmp_path / "run" / "run.db")
    connection.execute("UPDATE spans SET times = x'00'")
    connection.commit()
    connection.close()
    with pytest.raises(RunError, match=r"run cannot be resumed: rows 0 to 299 are damaged"):
        write(resume_at=5)
    (tmp_path / "run" / "run.db").write_bytes(b"not a database" * 1000)
    with pytest.raises(RunError, match=r"cannot be resumed: run.db is damaged"):
        write(resume_at=5)


def test_a_run_is_not_overwritten(tmp_path, write):
    write().close()
    with pytest.raises(
        FileExistsError, match=r"run already holds a run; continue it with resume=True, or name another"
    ):
        write()
    (tmp_path / "run" / "run.json").unlink()
    with pytest.raises(FileExistsError, match=r"holds a run\.db without its run\.json: a process .*; name"):
        write()
