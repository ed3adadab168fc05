"""`forewarn compare`, on runs made by hand."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Said
from tests.page_runs import written

Call = Callable[..., Said]


@pytest.fixture
def pair(root: Path) -> tuple[Path, Path]:
    return root / "faulty", root / "more" / "healthy"


def test_it_says_where_runs_part_and_fits_80_columns(
    forewarn: Call, pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "worse", [8 / (1 + step / 20) for step in range(100)])
    said = forewarn("compare", pair[1].relative_to(tmp_path), "worse", pair[0].relative_to(tmp_path))
    assert said.code == 0
    assert max(map(len, said.out.splitlines())) <= 80
    words = " ".join(said.out.split())
    assert "worse parts from runs/more/healthy at step 0" in words
    assert "Only runs/faulty has" in words
    assert "loss-spike L102 – – 6" in words
    assert "first 5 8 5" in words


def test_identical_runs_are_called_identical(forewarn: Call, pair: tuple[Path, Path], tmp_path: Path) -> None:
    shutil.copytree(pair[0], tmp_path / "copy")
    said = forewarn("compare", pair[0], tmp_path / "copy")
    assert "The runs are identical: every loss of 100 steps is the same." in said.out


def test_json_is_one_value(forewarn: Call, pair: tuple[Path, Path]) -> None:
    plain = json.loads(forewarn("compare", *pair, "--json").out)
    assert [run["run"] for run in plain["runs"]] == list(map(str, pair))
    assert [row["code"] for row in plain["alerts"]] == ["L102", "G103"]


def test_hostile_names_are_printed_as_text(forewarn: Call, tmp_path: Path) -> None:
    path = tmp_path / "[red]x[/red]\x1b[31m"
    written(path)
    written(tmp_path / "b")
    said = forewarn("compare", path, tmp_path / "b")
    assert "\x1b[31m" not in said.out
    assert "[red]x[/red]" in said.out


def test_what_cannot_be_compared_is_told_in_one_sentence(forewarn: Call, pair: tuple[Path, Path]) -> None:
    assert forewarn("compare", pair[0]).code == 64
    assert forewarn("compare", *[pair[0]] * 11).code == 64
    said = forewarn("compare", pair[0], pair[0].parent / "missing")
    assert (said.code, said.out) == (3, "")
    assert "missing" in said.err
