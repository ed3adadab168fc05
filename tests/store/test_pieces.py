"""All scopes of a metric at once are the same values as one series after the other."""

from pathlib import Path

import numpy as np
import pytest

from forewarn.store import RunWriter, open_run
from forewarn.types import Block, RunInfo


@pytest.mark.parametrize("num_steps", [3, 700])
def test_pieces_hold_every_series(tmp_path: Path, num_steps: int) -> None:
    writer = RunWriter(tmp_path / "run", info=RunInfo(), config={})
    random = np.random.default_rng(0)
    for step in range(num_steps):
        scopes = ("a", "b") if step % 3 else ("b", "c", "d")
        blocks = [Block(step, 0.0, "x/y", scopes, random.random(len(scopes), np.float32))]
        if step % 5 == 0:
            blocks.append(Block(step, 0.0, "x/z", ("",), random.random(1, np.float32)))
        writer.append(step, blocks)
    writer.flush()
    with open_run(tmp_path / "run") as run:
        read: dict[str, list[tuple[int, float]]] = {}
        for piece in run.pieces("x/y", 1, num_steps - 1):
            for scope, values in zip(piece.scopes, piece.values, strict=True):
                read.setdefault(scope, []).extend(zip(piece.steps.tolist(), values.tolist(), strict=True))
        for scope in run.scopes("x/y"):
            series = run.series("x/y", scope)
            expected = list(zip(series.steps.tolist(), series.values.tolist(), strict=True))
            assert sorted(read.get(scope, [])) == [pair for pair in expected if pair[0] >= 1]
        assert run.steps_of("x/z").tolist() == list(range(0, num_steps, 5))
        assert run.num_readings() == {"x/y": num_steps, "x/z": len(range(0, num_steps, 5))}
    writer.close()


def test_a_frozen_run_has_no_newer_readings(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "run", info=RunInfo(), config={})
    for step in range(3):
        writer.append(step, [Block(step, 0.0, "x/y", ("a",), np.array([step], np.float32))])
    writer.flush()
    with open_run(tmp_path / "run") as run:
        run.freeze()
        writer.append(3, [Block(3, 0.0, "x/y", ("a",), np.array([3], np.float32))])
        writer.flush()
        assert [piece.steps.tolist() for piece in run.pieces("x/y")] == [[0, 1, 2]]
        assert run.num_readings() == {"x/y": 3}
        assert run.steps_of("x/y").tolist() == [0, 1, 2]
    writer.close()
