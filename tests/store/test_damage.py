"""A damaged run is an error with a sentence, never a crash and never wrong numbers."""

from __future__ import annotations

import shutil
import sqlite3
import tracemalloc
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from forewarn.store import Run, RunError, RunWriter, open_run
from forewarn.types import RunInfo
from tests.store.rows import LAYERS, append_all, training


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with two chunks of each metric."""
    path = tmp_path_factory.mktemp("whole") / "run"
    writer = RunWriter(path, info=RunInfo(), config={})
    append_all(writer, training(300, every=2))
    writer.flush()
    writer.event("half")
    append_all(writer, training(100, every=2, first=300))
    writer.close()
    return path


@pytest.fixture
def stored(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "run"))


def _read_all(run: Run) -> None:
    for name in run.names():
        for scope in run.scopes(name)[:3]:
            run.series(name, scope)
    for _ in run.steps():
        pass
    run.alerts()
    run.findings()
    run.actions()
    run.events()
    assert run.num_steps is not None
    assert run.updated != 0
    assert run.last_step != -1
    assert run.end != ()


_TAIL = "INSERT INTO tail VALUES (400, 400, 0, x'{times}', x'{body}')"


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE bands SET body = substr(body, 1, 100)",
        "UPDATE bands SET body = 'text'",
        "DELETE FROM bands",
        "DELETE FROM chunks WHERE layout = 0",
        "UPDATE chunks SET count = count + 1",
        "UPDATE chunks SET count = 0",
        "UPDATE chunks SET count = 1 << 60",
        "UPDATE chunks SET band_scopes = 0",
        "UPDATE chunks SET band_scopes = 'wide'",
        "UPDATE chunks SET last = first - 1",
        "DELETE FROM spans WHERE first = 0",
        "UPDATE spans SET last = last + 1",
        "UPDATE spans SET last = 1 << 60",
        "UPDATE spans SET steps = x'00'",
        "UPDATE spans SET steps = 'text'",
        "UPDATE spans SET patterns = zeroblob(length(patterns) - 1)",
        "UPDATE spans SET patterns = x'ffffff7f'",
        "UPDATE spans SET patterns = x'ffffffff'",
        "UPDATE spans SET times = zeroblob(length(times) - 8)",
        "UPDATE layouts SET id = id + 10",
        "UPDATE layouts SET name = x'00'",
        "UPDATE layouts SET num_scopes = 'many'",
        "UPDATE layouts SET num_scopes = num_scopes + 1",
        "DELETE FROM layouts",
        "DELETE FROM patterns WHERE id = 0",
        "UPDATE patterns SET layouts = x'00'",
        "UPDATE patterns SET layouts = x'09000000'",
        "UPDATE scopes SET names = 'no json'",
        "UPDATE scopes SET names = '[1, 2]'",
        "UPDATE scopes SET names = '[]'",
        "DELETE FROM scopes",
        "DELETE FROM generation",
        "DROP TABLE spans",
        _TAIL.format(times="00", body="00"),
        _TAIL.format(times="0000000000000000", body="00000000"),
        _TAIL.replace("(400", "(500").format(times="0000000000000000", body="00" * 4 * (len(LAYERS) + 1)),
        "INSERT INTO tail VALUES (400, 400, 77, zeroblob(8), x'00')",
        "UPDATE events SET data = '[1'",
        "UPDATE events SET data = '[1]'",
        "UPDATE events SET time = 'noon'",
        "INSERT INTO records VALUES (1, 0.0, 1, 'finding', '{}')",
        "INSERT INTO records VALUES (1, 0.0, 1, 'alert', '{\"code\": 3}')",
        "INSERT INTO records VALUES (1, 0.0, 1, 'action', 'null')",
    ],
)
def test_damage_is_met_with_a_sentence(stored, statement):
    connection = sqlite3.connect(stored / "run.db")
    connection.execute(statement)
    connection.commit()
    connection.close()
    with pytest.raises(RunError, match="run"), open_run(stored) as run:
        _read_all(run)


_MOST_MEMORY = 48 << 20
"""Bytes that reading a small run may take, whatever it says of itself."""


@contextmanager
def _little_memory() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < _MOST_MEMORY
    finally:
        tracemalloc.stop()


@contextmanager
def _changed(stored: Path) -> Iterator[sqlite3.Connection]:
    connection = sqlite3.connect(stored / "run.db")
    yield connection
    connection.commit()
    connection.close()


def _zlib(lowest: int, width: int, size: int, num_bytes: int) -> bytes:
    """A histogram of format 1."""
    return zlib.compress(bytes([lowest, width, size]) + bytes(num_bytes), 9)


@pytest.mark.parametrize(
    ("count", "blob"),
    [
        pytest.param(4, _zlib(0, 64, 8, 128 << 20), id="a bomb"),
        pytest.param((128 << 20) // (8 * 129), _zlib(0, 64, 8, 128 << 20), id="a bomb that keeps its promise"),
        pytest.param(1 << 62, _zlib(0, 64, 8, 100), id="a number of scopes that is too large"),
        pytest.param(4, _zlib(0, 64, 8, 4 * 129 * 8 - 1), id="a byte too few"),
        pytest.param(4, _zlib(0, 64, 8, 4 * 129 * 8 + 1), id="a byte too many"),
        pytest.param(4, _zlib(0, 64, 8, 4 * 129 * 8)[:-1], id="no end"),
        pytest.param(4, _zlib(0, 64, 8, 4 * 129 * 8) + b"more", id="something behind"),
        pytest.param(4, _zlib(0, 64, 0, 0), id="counts of no bytes"),
        pytest.param(4, _zlib(63, 64, 1, 4 * 129), id="bins that there are not"),
        pytest.param(4, b"\x78", id="one byte"),
        pytest.param(1 << 62, bytes([1, 0, 64, 8]) + bytes(200), id="format 2, a number of scopes that is too large"),
    ],
)
def test_a_histogram_that_is_not_as_large_as_it_says_is_damaged(stored, count, blob):
    with _changed(stored) as connection:
        (scopes,) = connection.execute("SELECT id FROM scopes WHERE names LIKE '%weight%'").fetchone()
        connection.execute(
            "INSERT INTO distributions VALUES (1, 1, 0.0, 'weight/histogram', ?, 0, ?, ?)", [scopes, count, blob]
        )
    with open_run(stored) as run, _little_memory(), pytest.raises(RunError, match="a histogram is damaged"):
        run.histograms("weight/histogram", LAYERS[0])


def _empty_rows(connection: sqlite3.Connection) -> None:
    """Billions of rows in a few bytes each: evenly spaced steps, one pattern, and no times."""
    connection.execute("INSERT INTO patterns SELECT max(id) + 1, 1, x'' FROM patterns")
    (pattern,) = connection.execute("SELECT max(id) FROM patterns").fetchone()
    packed = np.array([400, 1], "<i8").tobytes(), np.array([pattern], "<i4").tobytes(), b""
    for number in range(2000):
        first = 400 + number * (1 << 18)
        connection.execute("INSERT INTO spans VALUES (?, ?, 0, ?, ?, ?)", [first, first + (1 << 18) - 1, *packed])


def _overlapping_spans(connection: sqlite3.Connection) -> None:
    connection.execute("INSERT INTO patterns SELECT max(id) + 1, 1, x'' FROM patterns")
    (pattern,) = connection.execute("SELECT max(id) FROM patterns").fetchone()
    packed = np.array([400, 1], "<i8").tobytes(), np.array([pattern], "<i4").tobytes(), b""
    for number in range(2000):
        connection.execute("INSERT INTO spans VALUES (?, ?, 0, ?, ?, ?)", [400 + number, 200_000 + number, *packed])


def _one_layout_many_times(connection: sqlite3.Connection) -> None:
    connection.execute("UPDATE patterns SET layouts = zeroblob(400000), shared = 1")


def _one_band_for_many_chunks(connection: sqlite3.Connection) -> None:
    (layout,) = connection.execute("SELECT layout FROM chunks ORDER BY count DESC LIMIT 1").fetchone()
    connection.execute("DELETE FROM chunks WHERE layout = ?", [layout])
    connection.execute("INSERT INTO bands VALUES (1000000, zeroblob(4000000))")
    connection.executemany(
        "INSERT INTO chunks (layout, first, last, count, level, band, band_scopes) VALUES (?, ?, ?, ?, 0, 1000000, 1)",
        [(layout, row, row + 100_000, 1_000_000) for row in range(400)],
    )


def _a_layout_of_many_scopes(connection: sqlite3.Connection) -> None:
    connection.execute("UPDATE layouts SET num_scopes = 1 << 27")


def _a_layout_of_less_than_no_scopes(connection: sqlite3.Connection) -> None:
    connection.execute("UPDATE layouts SET num_scopes = -1")


def _a_wide_tail(connection: sqlite3.Connection) -> None:
    for row in range(400, 500):
        connection.execute("INSERT INTO tail VALUES (?, ?, 0, zeroblob(8), zeroblob(1000000))", [row, row])


@pytest.mark.parametrize(
    "change",
    [
        _empty_rows, _overlapping_spans, _one_layout_many_times, _one_band_for_many_chunks, _a_layout_of_many_scopes,
        _a_layout_of_less_than_no_scopes, _a_wide_tail,
    ],
)  # fmt: skip
@pytest.mark.parametrize(
    "read", [lambda run: list(run.steps()), lambda run: run.series("train/loss")], ids=["steps", "series"]
)
def test_a_run_that_claims_more_than_it_holds_is_damaged_and_takes_little_memory(stored, change, read):
    with _changed(stored) as connection:
        change(connection)
    with open_run(stored) as run, _little_memory(), pytest.raises(RunError, match="damaged"):
        read(run)


def test_flipped_bytes_are_met_with_a_sentence_or_not_at_all(stored, tmp_path):
    random = np.random.default_rng(0)
    whole = np.fromfile(stored / "run.db", np.uint8)
    copy = tmp_path / "copy"
    copy.mkdir()
    shutil.copy(stored / "run.json", copy)
    num_met = 0
    for _ in range(60):
        broken = whole.copy()
        page = int(random.integers(len(whole) // 4096)) * 4096
        places = page + random.integers(0, 4096, 40)
        broken[places] = random.integers(0, 256, 40)
        broken.tofile(copy / "run.db")
        try:
            with open_run(copy) as run:
                _read_all(run)
        except RunError:
            num_met += 1
    assert num_met > 5


def test_a_truncated_file_is_met_with_a_sentence(stored):
    file = stored / "run.db"
    file.write_bytes(file.read_bytes()[:20_000])
    with pytest.raises(RunError, match="damaged"), open_run(stored) as run:
        _read_all(run)
