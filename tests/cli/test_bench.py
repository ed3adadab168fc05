"""`forewarn bench` on a model that takes no time: what it reports, never how fast it is."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from forewarn.cli.bench import HEADINGS
from forewarn.lab.bench import rounds
from forewarn.lab.bench.tiers import own_contenders
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
    monkeypatch.setattr(rounds, "LEAST_TURN_SECONDS", 0.0)  # short turns: no figure is looked at
    return tmp_path


def test_help_teaches_with_examples_and_names_every_tier(forewarn: Call) -> None:
    text = " ".join(forewarn("bench", "--help").out.split())
    assert "Examples:" in text
    assert "forewarn bench --workload mymodel:make" in text
    assert "(model, make_batch, loss)" in text
    for contender in own_contenders():
        assert contender.name in text
    for heading in filter(None, HEADINGS):
        assert heading in text


def test_json_holds_every_figure_and_nothing_else_is_printed(forewarn: Call) -> None:
    said = forewarn("bench", *QUICK, "--json")
    assert said.code == 0
    answer = json.loads(said.out)
    assert set(answer) == {"command", "machine", "workloads"}
    assert answer["machine"]["versions"]["torch"]
    (workload,) = answer["workloads"]
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


def test_the_table_fits_into_80_columns(forewarn: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    said = forewarn("bench", *QUICK)
    assert said.code == 0
    assert all(len(line) <= 80 for line in said.out.splitlines())
    for contender in own_contenders():
        (row,) = [line for line in said.out.splitlines() if line.startswith(f"{contender.name} ")]
        assert "%" in row
        assert "…" not in row
    assert "say nothing about an accelerator" in said.out.replace("\n", " ")
    assert "judging by all rules" in said.out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--workload", "gpt7"], "there is no workload 'gpt7'"),
        (["--workload", "bench_workload:nothing"], "cannot be imported"),
        (["--workload", "bench_workload:broken"], "expected a tuple (model, make_batch, loss)"),
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
