"""`forewarn faults`, as a person would call it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Said

Call = Callable[..., Said]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults")


def test_a_quick_run_scores_a_handful_of_cases(forewarn: Call, folder: Path) -> None:
    said = forewarn("faults", "--quick", "--out", folder, "--json")
    assert said.code == 0
    result = json.loads(said.out)
    assert len(result["healthy"]) == 9
    by_name = {case["case"].split("/")[1]: case for case in result["faults"]}
    assert len(by_name) == 6
    missing = by_name["not-in-optimizer"]
    assert (missing["harmful"], missing["named"], missing["repaired"]["first remedy"]) == (True, True, True)


def test_records_are_shown_again_without_training(
    forewarn: Call, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    page = folder / "page.md"
    said = forewarn("faults", "--quick", "--out", folder, "--page", page)
    assert said.code == 0
    assert "harmful faults detected" in said.out
    assert max(map(len, said.out.splitlines())) <= 80
    assert page.read_text().startswith("# Fault benchmark\n")
    stored = forewarn("faults", "--quick", "--out", folder, "--stored", "--fault", "lr-too-high", "--json")
    assert [case["case"].split("/")[1] for case in json.loads(stored.out)["faults"]] == ["lr-too-high"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--fault", "lr-to-high"], "did you mean 'lr-too-high'"),
        (["--workload", "gtp"], "did you mean 'gpt'"),
        (["--set", "validation", "--workload", "mlp"], "the validation set has none of these workloads"),
        (["--judge-again"], "--judge-again needs the --out folder"),
        (["--stored"], "--stored needs the --out folder"),
    ],
)
def test_a_wrong_argument_says_what_to_do(forewarn: Call, arguments: list[str], words: str) -> None:
    said = forewarn("faults", *arguments)
    assert said.code == 3
    assert words in said.err
