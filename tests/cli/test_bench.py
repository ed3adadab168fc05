"""The benchmark as a command, on a model that takes no time: what it says, never how fast."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from forewarn.lab.bench.lineup import all_contenders
from tests.cli.conftest import Said

Call = Callable[..., Said]

WORKLOAD = """
import torch

def make():
    return torch.nn.Linear(3, 2), lambda: torch.ones(4, 3), lambda model, batch: model(batch).square().mean()

def broken():
    return torch.nn.Linear(3, 2)
"""
QUICK = ("--workload", "bench_workload:make", "--rounds", "2", "--steps", "3")


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a workload in it."""
    (tmp_path / "bench_workload.py").write_text(WORKLOAD)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "bench_workload", raising=False)
    return tmp_path


def test_help_teaches_with_examples_and_names_every_contender(forewarn: Call) -> None:
    text = forewarn("bench", "--help").out
    assert "Examples:" in text
    assert "forewarn bench --workload all --scaling --out docs/overhead.md" in text
    assert "(model, make_batch, loss)" in text
    for contender in all_contenders():
        assert contender.name in text


def test_json_holds_every_figure_and_nothing_else_is_printed(forewarn: Call) -> None:
    said = forewarn("bench", *QUICK, "--contenders", "forewarn", "--json")
    assert said.code == 0
    found = json.loads(said.out)
    assert set(found) == {"command", "machine", "workloads", "scaling"}
    assert found["machine"]["versions"]["torch"]
    (workload,) = found["workloads"]
    assert (workload["num_parameters"], workload["num_tensors"], workload["rounds"]) == (8, 2, 2)
    names = [cost["name"] for cost in workload["costs"]]
    assert names == [
        "bare",
        "bare-again",
        "forewarn-every-step",
        "forewarn-default",
        "forewarn-full",
        "forewarn-activations",
    ]
    assert workload["costs"][0]["added_share"] == {"median": 0.0, "low": 0.0, "high": 0.0}
    assert all(cost["syncs"] == 0 for cost in workload["costs"])
    assert workload["judging"]["measured"]["median"] > 0


def test_the_table_names_what_ran_and_how_to_install_what_did_not(
    forewarn: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    gone = {"wandb", "pulsegrad"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name in gone else find(name, *rest))
    said = forewarn("bench", *QUICK, "--contenders", "forewarn-full,wandb,pulsegrad")
    assert said.code == 0
    assert "wandb: not installed: pip install wandb" in said.out
    assert "pulsegrad: not installed: pip install pulsegrad" in said.out
    assert "added to a step" in said.out
    assert any(line.startswith("forewarn-full ") and "%" in line for line in said.out.splitlines())
    assert "say nothing about an accelerator" in said.out
    assert "judging by all rules" in said.out


def test_the_page_is_well_formed_and_says_how_it_was_made(
    forewarn: Call, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    arguments = ("bench", *QUICK, "--contenders", "forewarn-default", "--out", "pages/overhead.md")
    monkeypatch.setattr(sys, "argv", ["/usr/bin/forewarn", *arguments])
    said = forewarn(*arguments)
    assert said.code == 0
    assert "No plot was drawn, for want of matplotlib: pip install matplotlib" in said.err
    text = (place / "pages" / "overhead.md").read_text()
    assert text.startswith("# ")
    assert f"`forewarn {' '.join(arguments)}`" in text
    assert "## bench_workload:make" in text
    assert "cores" in text
    assert "torch 2" in text
    assert "](" not in text  # no picture, so no link to one
    assert "```" not in text  # its command is not for running again by whoever checks the documentation
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len(rows) == 2 + 2
    assert len({row.count("|") for row in rows}) == 1
    assert "- `forewarn-default`: " in text


def test_a_plot_is_drawn_beside_the_page(forewarn: Call, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    from forewarn.lab.bench import scaling

    monkeypatch.setattr(scaling, "ELEMENTS", (1_000, 2_000))
    monkeypatch.setattr(scaling, "TENSORS", (2, 4))
    said = forewarn("bench", *QUICK, "--contenders", "bare-again", "--scaling", "--out", "overhead.md")
    assert said.code == 0
    assert "](overhead.png)" in (place / "overhead.md").read_text()
    assert (place / "overhead.png").read_bytes().startswith(b"\x89PNG")


def test_scaling_alone_is_told_as_lines(forewarn: Call, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from forewarn.lab.bench import scaling

    monkeypatch.setattr(scaling, "ELEMENTS", (1_000, 2_000))
    monkeypatch.setattr(scaling, "TENSORS", (2, 4))
    monkeypatch.setattr(scaling, "FIXED_TENSORS", 2)
    monkeypatch.setattr(scaling, "FIXED_ELEMENTS", 1_000)
    said = forewarn("bench", "--workload", "none", "--scaling", "--json")
    assert [each["axis"] for each in json.loads(said.out)["scaling"]] == ["elements", "tensors"]
    assert "R²" in forewarn("bench", "--workload", "none", "--scaling").out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--workload", "gpt7"], "there is no workload 'gpt7'"),
        (["--workload", "bench_workload:nothing"], "cannot be imported"),
        (["--workload", "bench_workload:broken"], "expected a tuple (model, make_batch, loss)"),
        (["--contenders", "wnadb"], "there is no contender 'wnadb'"),
    ],
)
def test_a_wrong_name_is_one_sentence(forewarn: Call, arguments: list[str], words: str) -> None:
    said = forewarn("bench", *QUICK, *arguments)
    assert said.code == 3
    assert words in said.err
    assert len(said.err.strip().splitlines()) == 1


@pytest.mark.parametrize("arguments", [["--rounds", "0"], ["--steps", "2"], ["--workload"]])
def test_a_wrong_command_line_is_64(forewarn: Call, arguments: list[str]) -> None:
    assert forewarn("bench", *arguments).code == 64
