"""`forewarn selftest`: what it prints, and its exit codes."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from forewarn.lab import selftest
from forewarn.lab.selftest import Result
from tests.cli.conftest import Said

Call = Callable[..., Said]


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """One small model, a few steps."""
    for name in ("SAME_STEPS", "COUNTED_STEPS", "TIMED_STEPS", "WARM_UP_STEPS"):
        monkeypatch.setattr(selftest, name, 2)
    monkeypatch.setattr(selftest, "MODELS", {"perceptron": selftest.MODELS["perceptron"]})


def test_a_table_says_what_was_checked(forewarn: Call) -> None:
    said = forewarn("selftest")
    assert (said.code, said.err) == (0, "")
    rows = [line.split() for line in said.out.splitlines()]
    assert ["✓", "same", "bits", "perceptron"] in [row[:4] for row in rows]
    assert ["·", "cost", "perceptron", "step"] in [row[:4] for row in rows]
    assert "checks passed" in said.out


def test_json_is_one_object(forewarn: Call) -> None:
    told = json.loads(forewarn("selftest", "--json").out)
    assert told["passed"] is True
    assert "torch" in told["machine"]["versions"]
    assert {result["check"] for result in told["results"]} == {"same bits", "right numbers", "no waiting", "cost"}


def test_a_failed_check_is_in_the_exit_code(forewarn: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    results = [Result("same bits", "perceptron", False, "DIFFER"), Result("no waiting", "perceptron", True, "fine")]
    monkeypatch.setattr(selftest, "run_checks", lambda device, folder: iter(results))
    said = forewarn("selftest")
    assert said.code == 1
    assert "1 of 2 checks failed" in said.out
    assert forewarn("selftest", "--json").code == 1


def test_a_device_that_is_not_there_is_an_error(forewarn: Call) -> None:
    said = forewarn("selftest", "--device", "cuda:99")
    assert said.code == 3
    assert "'cuda:99' cannot be used here" in said.err
