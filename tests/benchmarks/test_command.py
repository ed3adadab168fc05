"""The comparison with other tools on a model that takes no time: what it reports, never how fast it is."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.overhead import scaling
from benchmarks.overhead.__main__ import command
from benchmarks.overhead.lineup import all_contenders
from tests.cli.conftest import Said

Call = Callable[..., Said]

WORKLOAD = "tests.lab.bench.conftest:parts"
QUICK = ("--workload", WORKLOAD, "--rounds", "2", "--steps", "3")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def overhead(place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Call:
    """Calls the command in this process, with a terminal as wide as a file."""
    monkeypatch.delenv("COLUMNS", raising=False)

    def call(*arguments: str) -> Said:
        with pytest.raises(SystemExit) as end:
            command.main(arguments)
        printed = capsys.readouterr()
        return Said(int(end.value.code or 0), printed.out, printed.err)

    return call


def test_help_teaches_with_examples_and_names_every_contender(overhead: Call) -> None:
    text = overhead("--help").out
    assert "Examples:" in text
    assert "python -m benchmarks.overhead --workload all --scaling --out docs/overhead.md" in text
    for contender in all_contenders():
        assert contender.name in text


def test_the_table_names_what_ran_and_how_to_install_what_did_not(
    overhead: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    gone = {"wandb", "pulsegrad"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name in gone else find(name, *rest))
    said = overhead(*QUICK, "--contenders", "forewarn-activations,wandb,pulsegrad")
    assert said.code == 0
    assert "wandb: not installed: pip install wandb" in said.out
    assert "pulsegrad: not installed: pip install pulsegrad" in said.out
    assert any(line.split()[:2] == ["added", "quartiles"] for line in said.out.splitlines())
    assert any(line.startswith("forewarn-activations ") and "%" in line for line in said.out.splitlines())
    assert "say nothing about an accelerator" in said.out
    assert "judging by all rules" in said.out


def test_the_page_is_well_formed_and_says_how_it_was_made(
    overhead: Call, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    arguments = (*QUICK, "--contenders", "forewarn-default", "--out", "pages/overhead.md")
    monkeypatch.setattr(sys, "argv", ["benchmarks/overhead/__main__.py", *arguments])
    said = overhead(*arguments)
    assert said.code == 0
    assert "No plot was drawn, for want of matplotlib: pip install matplotlib" in said.err
    text = (place / "pages" / "overhead.md").read_text()
    assert text.startswith("# ")
    assert f"`python -m benchmarks.overhead {' '.join(arguments)}`" in text
    assert f"## {WORKLOAD}" in text
    assert "cores" in text
    assert "torch 2" in text
    assert "](" not in text  # no picture, so no link to one
    assert "```" not in text  # its command is not for running again by whoever checks the documentation
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len(rows) == 2 + 2
    assert len({row.count("|") for row in rows}) == 1
    assert "- `forewarn-default`: " in text


def test_a_plot_is_drawn_beside_the_page(overhead: Call, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(scaling, "ELEMENTS", (1_000, 2_000))
    monkeypatch.setattr(scaling, "TENSORS", (2, 4))
    said = overhead(*QUICK, "--contenders", "bare-again", "--scaling", "--out", "overhead.md")
    assert said.code == 0
    assert "](overhead.png)" in (place / "overhead.md").read_text()
    assert (place / "overhead.png").read_bytes().startswith(b"\x89PNG")


def test_scaling_alone_is_told_as_lines(overhead: Call, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "ELEMENTS", (1_000, 2_000))
    monkeypatch.setattr(scaling, "TENSORS", (2, 4))
    monkeypatch.setattr(scaling, "FIXED_TENSORS", 2)
    monkeypatch.setattr(scaling, "FIXED_ELEMENTS", 1_000)
    answer = json.loads(overhead("--workload", "none", "--scaling", "--json").out)
    assert set(answer) == {"command", "machine", "workloads", "scaling", "families"}
    assert [axis["axis"] for axis in answer["scaling"]] == ["elements", "tensors"]
    assert "R²" in overhead("--workload", "none", "--scaling").out


def test_a_wrong_name_is_one_sentence(overhead: Call) -> None:
    said = overhead(*QUICK, "--contenders", "wnadb")
    assert said.code == 3
    assert "there is no contender 'wnadb'" in said.err
    assert len(said.err.strip().splitlines()) == 1
