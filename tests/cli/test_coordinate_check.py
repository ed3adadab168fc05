"""`forewarn coordinate-check` as a person calls it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Said

Call = Callable[..., Said]
QUICK = ("coordinate-check", "--widths", "32,64,16", "--steps", "2", "--seeds", "1")


def test_a_table_and_a_verdict_for_each_parametrization(
    forewarn: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    said = forewarn(*QUICK, "--out", tmp_path / "check.png")
    assert said.code == 0
    assert "after 2 steps, over widths 16, 32, 64 and 1 seed," in said.out
    assert "standard parametrization: not width-stable" in said.out
    assert "\nmuP: " in said.out
    [standard, mup] = [line.split() for line in said.out.splitlines() if line.startswith("blocks.0.mlp.output ")]
    assert standard[4] == "grows"
    assert "Judged from 3 widths and one seed: " in said.out
    assert float(standard[1]) > 0.3 > abs(float(mup[1].replace("−", "-")))
    assert "No plot will be drawn because matplotlib is missing: pip install matplotlib" in said.err
    assert not (tmp_path / "check.png").exists()


def test_json_has_every_step(forewarn: Call, tmp_path: Path) -> None:
    said = forewarn(*QUICK, "--parametrization", "standard", "--json", "--out", tmp_path / "check.png")
    [found] = json.loads(said.out)
    assert found["parametrization"] == "standard"
    assert found["verdict"] == "not width-stable"
    assert len(found["steps"]) == 2
    assert found["steps"][1]["blocks.1.mlp.input"]["(W_t-W_0)x_t"]["trend"] == "grows"


def test_the_plot_is_a_picture_in_a_folder_that_is_made(forewarn: Call, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    said = forewarn(*QUICK, "--out", tmp_path / "plots" / "check.png")
    assert f"Wrote {tmp_path / 'plots' / 'check.png'}" in said.err
    assert (tmp_path / "plots" / "check.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("widths", "words"),
    [("64,128", "2 widths are too few"), ("64,128,250", "width 250 does not split"), ("64,wide", "is not a list")],
)
def test_widths_that_make_no_sense_are_a_wrong_command_line(forewarn: Call, widths: str, words: str) -> None:
    said = forewarn("coordinate-check", "--widths", widths)
    assert said.code == 64
    assert words in " ".join(said.err.split())


def test_a_place_that_cannot_be_written_is_one_sentence(forewarn: Call, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    said = forewarn("coordinate-check", "--out", tmp_path / "file" / "check.png")
    assert said.code == 3
    assert "cannot be written" in said.err
