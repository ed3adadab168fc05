"""The summary beside a run: what it says, when it counts, and that nothing depends on it."""

import json
import math
import os
import signal
import subprocess
import sys
import time

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from forewarn.store import RunWriter, open_run
from forewarn.store.run_summary import NAME, Summary, kept_summary, summary_of
from forewarn.types import Alert, AlertState, Block, Finding, RunInfo, Severity

ONE = ("",)


def block(step, value=1.0, name="train/loss", scopes=ONE, at=1e9):
    return Block(step, at + step, name, scopes, np.full(len(scopes), value, np.float32))


def alert(severity=Severity.WARNING, state=AlertState.FIRING, code="L102", scope="", since=0):
    finding = Finding(code, scope, since, severity, 9.0, 2.0)
    return Alert(code, "loss-spike", scope, severity, state, since, since, since, finding)


def stored(path):
    with open_run(path) as run:
        return summary_of(run)


def test_it_says_what_the_database_says(write, tmp_path):
    writer = write(info=RunInfo(model="Net", started=5.0))
    for step in range(7):
        writer.append(step, [block(step, 2.0 - step / 10), block(step, name="train/lr", scopes=("0", "1"))])
    writer.append(6, [block(6, name="eval/accuracy")])
    writer.record(3, alerts=[alert()])
    writer.record(4, alerts=[alert(Severity.CRITICAL), alert(code="G104", scope="a")])
    writer.record(5, alerts=[alert(Severity.CRITICAL, AlertState.RESOLVED)])
    writer.flush()
    _settle(tmp_path / "run")
    severities = {"critical": 1, "warning": 1}
    expected = Summary("Net", 7, 6, float(np.float32(1.4)), 1e9 + 6, None, severities)
    assert kept_summary(tmp_path / "run") == expected == stored(tmp_path / "run")
    writer.close("KeyboardInterrupt")
    assert kept_summary(tmp_path / "run") == stored(tmp_path / "run")
    assert kept_summary(tmp_path / "run").end == "KeyboardInterrupt"


def _settle(path):
    """Wait until the writer has put its summary in place, which it does right after a flush."""
    for _ in range(200):
        if kept_summary(path) is not None:
            return
        time.sleep(0.01)


LOSSES = st.floats(width=32, allow_nan=False)
"""NaN is not equal to itself; that it is kept is tested by itself."""
ACTIONS = st.one_of(
    st.tuples(st.just("append"), st.integers(0, 12), LOSSES, st.booleans()),
    st.tuples(
        st.just("alert"), st.sampled_from(list(Severity)), st.sampled_from([AlertState.FIRING, AlertState.RESOLVED]),
        st.sampled_from("ab"), st.integers(0, 2),
    ),
    st.tuples(st.just("resume"), st.integers(0, 12)),
    st.tuples(st.just("flush")),
)  # fmt: skip


@given(actions=st.lists(ACTIONS, max_size=12))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_is_written_it_says_what_the_database_says(tmp_path_factory, actions):
    path = tmp_path_factory.mktemp("any") / "run"
    writer = RunWriter(path, info=RunInfo(), config={})
    for kind, *given_values in actions:
        if kind == "append":
            step, loss, has_loss = given_values
            writer.append(step, [block(step, loss)] if has_loss else [block(step, name="train/lr")])
        elif kind == "alert":
            severity, state, scope, since = given_values
            writer.record(since, alerts=[alert(severity, state, scope=scope, since=since)])
        elif kind == "resume":
            writer.close()
            writer = RunWriter(path, info=RunInfo(), config={}, resume_at=given_values[0])
        else:
            writer.flush()
    writer.close()
    assert kept_summary(path) == stored(path)


def test_a_loss_that_is_no_number_is_kept(write, tmp_path):
    writer = write()
    writer.append(0, [block(0, np.nan)])
    writer.close()
    assert np.isnan(kept_summary(tmp_path / "run").last_loss)


_WRITE_UNTIL_KILLED = """
import sys, itertools, numpy as np
from forewarn.store import RunWriter
from forewarn.types import Block, RunInfo
writer = RunWriter(sys.argv[1], info=RunInfo(), config={})
for step in itertools.count():
    writer.append(step, [Block(step, 1e9 + step, "train/loss", ("",), np.array([step], np.float32))])
    if step % 50 == 0:
        writer.flush()
        print(step, flush=True)
"""


@pytest.mark.parametrize("lines", [2, 4, 9])
def test_after_a_kill_it_does_not_count_unless_it_is_right(tmp_path, lines):
    path = tmp_path / "run"
    with subprocess.Popen([sys.executable, "-c", _WRITE_UNTIL_KILLED, str(path)], stdout=subprocess.PIPE) as process:
        for _ in range(lines):
            process.stdout.readline()
        process.send_signal(signal.SIGKILL)
    assert kept_summary(path) in (None, stored(path))
    writer = RunWriter(path, info=RunInfo(), config={}, resume_at=10)
    writer.close()
    assert kept_summary(path) == stored(path)
    assert kept_summary(path).num_steps == 10


def test_a_live_run_has_one_that_is_current(write, tmp_path):
    writer = write()
    for step in range(5):
        writer.append(step, [block(step, step)])
        writer.flush()
        _settle(tmp_path / "run")
        assert kept_summary(tmp_path / "run").num_steps == step + 1


@pytest.mark.parametrize("name", ["run.db", "run.json"])
def test_it_does_not_count_once_another_file_has_changed(write, tmp_path, name):
    write().close()
    path = tmp_path / "run"
    assert kept_summary(path) is not None
    os.utime(path / name, ns=(1, 1))
    assert kept_summary(path) is None


HOSTILE = {
    "empty": "", "no json": "{", "list": "[]", "number": "1" * 5000, "deep": "[" * 60000, "null": "null",
    "huge": '{"files": "' + "x" * 100_000 + '"}',
}  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE.keys())
def test_one_that_cannot_be_read_does_not_count(write, tmp_path, text):
    write().close()
    (tmp_path / "run" / NAME).write_text(text)
    assert kept_summary(tmp_path / "run") is None


@pytest.mark.parametrize("field", ["model", "num_steps", "last_step", "last_loss", "updated", "end", "severities"])
@pytest.mark.parametrize(
    "value", [None, [], {}, "words", {"critical": "many"}, {"critical": [1]}, 10**400, -1, math.inf, -math.inf]
)
def test_a_wrong_value_is_refused_or_can_be_shown(write, tmp_path, field, value):
    from forewarn.cli.ls import _row

    write().close()
    path = tmp_path / "run"
    plain = json.loads((path / NAME).read_text())
    plain["summary"][field] = value
    (path / NAME).write_text(json.dumps(plain))
    summary = kept_summary(path)
    if summary is not None:
        assert all(cell.plain.isprintable() for cell in _row(path, summary))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs FIFOs")
def test_a_fifo_in_its_place_blocks_nobody(write, tmp_path):
    writer = write()
    writer.flush()
    _settle(tmp_path / "run")
    (tmp_path / "run" / NAME).unlink()
    os.mkfifo(tmp_path / "run" / NAME)
    assert kept_summary(tmp_path / "run") is None


def test_a_link_in_the_place_of_its_draft_is_not_followed(write, tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    writer = write()
    writer.flush()
    (tmp_path / "run" / f"{NAME}.{os.getpid()}.draft").symlink_to(victim)
    writer.append(0, [block(0)])
    writer.close()
    assert victim.read_text() == "mine"
    assert kept_summary(tmp_path / "run").num_steps == 1


def test_a_summary_that_cannot_be_written_costs_no_reading(write, tmp_path):
    path = tmp_path / "run"
    path.mkdir()
    (path / NAME).mkdir()
    (path / NAME / "in the way").touch()
    writer = write()
    writer.append(0, [block(0, 3.0)])
    writer.close()
    assert writer.failure is None
    assert kept_summary(path) is None
    assert stored(path).last_loss == 3.0
