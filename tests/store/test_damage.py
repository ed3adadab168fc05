"""A damaged run is an error with a sentence, never a crash and never wrong numbers."""

from __future__ import annotations

import shutil
import sqlite3
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
