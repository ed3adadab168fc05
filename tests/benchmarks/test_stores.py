"""The benchmarks of stores and of a folder of runs do what they say."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import store, views
from forewarn.views.page.folder import Folder


def test_every_store_gets_the_same_readings_and_gives_them_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "STEPS", 60)
    store.compare(tmp_path, rounds=1)
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "1,000 readings of 210 series in 60 steps"
    assert {"forewarn", "TensorBoard"} <= {line.split("  ")[0] for line in printed[2:]}
    assert all(line.count("×") == 3 for line in printed[2:])
    assert printed[2].count("  1.0 ×") == 3, "times are multiples of forewarn's"


def test_a_fleet_has_runs_that_ended_and_runs_that_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(views, "FLEET_STEPS", 20)
    training = views.write_fleet(tmp_path / "runs", 6)
    for _ in range(2):
        rows = {row["run"]: row["state"] for row in Folder(tmp_path / "runs").rows()}
        assert len(rows) == 6
        assert sorted(rows[f"training/{path.name}"] for path in training) == ["running", "running"]
        assert list(rows.values()).count("completed") == 3 + 1, "the writer of the original has closed it"
        views._touch(training)
    _, runs = Folder(tmp_path / "runs").exported()
    assert {one.step for one in runs if one.state == "running"} == {19}
