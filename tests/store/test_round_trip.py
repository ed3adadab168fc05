"""What was appended comes back: every bit, every order, every series."""

from __future__ import annotations

import sqlite3
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forewarn.store import RunWriter, open_run
from forewarn.types import Block, ParameterInfo, RunInfo
from tests.store.rows import LAYERS, Row, append_all, bits, check_against, training


def test_a_run_comes_back_while_it_is_written_and_after_it_was_closed(tmp_path, write):
    rows = training(700)
    writer = write()
    append_all(writer, rows)
    writer.flush()
    with open_run(tmp_path / "run") as run:
        check_against(run, rows)
        assert (run.last_step, run.num_steps, run.updated, run.end) == (699, 700, 1e9 + 699, None)
    writer.close()
    assert writer.failure is None
    with open_run(tmp_path / "run") as run:
        check_against(run, rows)
        assert run.names() == ["gradient/norm", "train/loss"]
        assert run.scopes("gradient/norm") == LAYERS
        assert run.end is not None
        assert run.end[0] == "completed"


@pytest.mark.usefixtures("small_chunks")
def test_a_run_comes_back_from_chunks_of_every_level(tmp_path, write):
    rows = training(400, every=7)
    writer = write()
    with open_run(tmp_path / "run") as run:
        for end in range(10, 401, 10):  # a batch of many rows would be merged at once, and levels be left out
            append_all(writer, rows[end - 10 : end])
            writer.flush()
            if end % 50 == 0:
                check_against(run, rows[:end])
    writer.close()
    levels = {level for (level,) in _query(tmp_path / "run", "SELECT DISTINCT level FROM chunks")}
    assert len(levels) >= 3
    assert _query(tmp_path / "run", "SELECT count(*) FROM tail") == [(0,)]
    with open_run(tmp_path / "run") as run:
        check_against(run, rows)
        assert bits(run.steps(start=333)) == bits(rows[333:])


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize(
    ("num_tensors", "page_bytes"), [(0, 4096), (64, 4096), (148, 16384), (1000, 65536), (9999, 65536)]
)
def test_pages_are_as_large_as_the_steps_of_a_run_are_wide(tmp_path, write, num_tensors, page_bytes):
    one = ParameterInfo((2, 3), "Linear.weight", "float32", 0, True)
    info = RunInfo(parameters={f"layers.{at}.weight": one for at in range(num_tensors)})
    rows = training(100, every=3)
    writer = write(info=info)
    append_all(writer, rows[:50])
    writer.flush()
    with open_run(tmp_path / "run") as run:
        check_against(run, rows[:50])
    writer.close()
    writer = write(info=RunInfo(), resume_at=40)
    append_all(writer, rows[40:])
    writer.close()
    assert _query(tmp_path / "run", "PRAGMA page_size") == [(page_bytes,)]
    with open_run(tmp_path / "run") as run:
        check_against(run, rows)


def test_every_kind_of_nan_keeps_its_bits(tmp_path, write):
    patterns = np.array([0x7FC00000, 0x7F800001, 0xFFC12345, 0x7F800000, 0xFF800000, 0x80000000, 1], np.uint32)
    scopes = tuple("abcdefg")
    writer = write()
    for step in range(300):
        writer.append(step, [Block(step, 0.0, "train/odd", scopes, np.roll(patterns, step).view(np.float32))])
    writer.close()
    with open_run(tmp_path / "run") as run:
        for step, [block] in run.steps():
            assert np.array_equal(block.values.view(np.uint32), np.roll(patterns, step))
        first = run.series("train/odd", "a").values.view(np.uint32)
    assert np.array_equal(first, [np.roll(patterns, step)[0] for step in range(300)])


def test_a_step_may_be_appended_to_again_and_a_metric_may_come_twice(tmp_path, write):
    def block(step: int, value: float, time: float = 0.0) -> Block:
        return Block(step, time, "train/loss", ("",), np.array([value], np.float32))

    rows: list[Row] = [
        (0, [block(0, 1, 10.0), block(0, 2, 11.0)]),
        (1, [block(1, 3)]),
        (0, [block(0, 4)]),
        (2, []),
        (1, [block(1, 5, 1.0), block(1, 6, 1.0), block(1, 7, 1.0)]),
    ]
    writer = write()
    append_all(writer, rows)
    writer.flush()
    for _ in range(2):
        with open_run(tmp_path / "run") as run:
            check_against(run, rows)
            assert run.series("train/loss").values.tolist() == [1, 2, 3, 4, 5, 6, 7]
            assert run.series("train/loss").times.tolist() == [10, 11, 0, 0, 1, 1, 1]
            assert run.num_steps == 3
        writer.close()


def test_values_are_copied_so_that_their_buffer_can_be_used_again(tmp_path, write):
    buffer = np.zeros(len(LAYERS), np.float32)
    writer = write()
    for step in range(10):
        buffer[:] = step
        writer.append(step, [Block(step, 0.0, "gradient/norm", LAYERS, buffer[::-1])])
    writer.close()
    with open_run(tmp_path / "run") as run:
        assert run.series("gradient/norm", LAYERS[3]).values.tolist() == list(range(10))


def test_blocks_of_another_step_or_size_are_refused(write):
    writer = write()
    with pytest.raises(ValueError, match="train/loss of step 2 has 1 values for 1 scopes; blocks of step 1"):
        writer.append(1, [Block(2, 0.0, "train/loss", ("",), np.zeros(1, np.float32))])
    with pytest.raises(ValueError, match="has 3 values for 2 scopes"):
        writer.append(1, [Block(1, 0.0, "gradient/norm", ("a", "b"), np.zeros(3, np.float32))])


def test_many_scopes_are_cut_into_bands_and_one_series_reads_one_band_of_each_chunk(tmp_path, write):
    scopes = tuple(f"layer{i}" for i in range(3000))
    values = np.random.default_rng(0).random((300, 3000), dtype=np.float32)
    writer = write()
    for step in range(300):
        writer.append(step, [Block(step, 0.0, "gradient/norm", scopes, values[step])])
    writer.close()
    for column in (0, 1, 1498, 2999):
        with open_run(tmp_path / "run") as run:
            assert np.array_equal(run.series("gradient/norm", scopes[column]).values, values[:, column])
    sizes = _query(tmp_path / "run", "SELECT max(length(body)), sum(length(body)) FROM bands")
    assert sizes == [(max(size for size, _ in sizes), values.nbytes)]
    assert sizes[0][0] <= 4 * 4096


def test_an_empty_run_can_be_read(tmp_path, write):
    write().flush()
    with open_run(tmp_path / "run") as run:
        assert (run.names(), run.last_step, run.num_steps, run.updated, run.end) == ([], None, 0, None, None)
        assert list(run.steps()) == []


_MEMORY = Path("/dev/shm")
"""Hundreds of runs would otherwise wait for the disk."""

_NUMBERS = st.floats(width=32, allow_nan=True, allow_infinity=True)
_SCOPES = st.lists(st.text(max_size=3), max_size=4, unique=True).map(tuple)


@st.composite
def _blocks(draw: st.DrawFn, step: int) -> list[Block]:
    blocks = []
    time = draw(st.sampled_from([0.0, 1.5]))
    for _ in range(draw(st.integers(0, 4))):
        scopes = draw(_SCOPES)
        values = np.array(draw(st.lists(_NUMBERS, min_size=len(scopes), max_size=len(scopes))), np.float32)
        time = draw(st.sampled_from([time, time, time + 0.25]))
        blocks.append(Block(step, time, draw(st.sampled_from(["a/x", "b/y"])), scopes, values))
    return blocks


@st.composite
def _rows(draw: st.DrawFn) -> list[Row]:
    steps = draw(st.lists(st.integers(0, 20), max_size=40))
    return [(step, draw(_blocks(step))) for step in steps]


@given(rows=_rows(), pieces=st.integers(1, 4), cut=st.none() | st.integers(0, 20))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.usefixtures("small_chunks")
def test_any_rows_come_back_whatever_their_scopes_and_wherever_they_are_cut(rows, pieces, cut):
    with tempfile.TemporaryDirectory(dir=_MEMORY if _MEMORY.is_dir() else None) as directory:
        path = Path(directory) / "run"
        writer = RunWriter(path, info=RunInfo(), config={})
        for piece in range(pieces):
            append_all(writer, rows[piece::pieces])
            writer.flush()
        rows = [row for piece in range(pieces) for row in rows[piece::pieces]]
        with open_run(path) as run:
            check_against(run, rows)
            writer.close()
            check_against(run, rows)
        if cut is not None:
            kept = [row for row in rows if row[0] < cut]
            again = RunWriter(path, info=RunInfo(), config={}, resume_at=cut)
            append_all(again, rows)
            again.close()
            with open_run(path) as run:
                check_against(run, kept + rows)


def _query(path: Path, statement: str) -> list[tuple[int, ...]]:
    connection = sqlite3.connect(path / "run.db")
    try:
        return connection.execute(statement).fetchall()
    finally:
        connection.close()
