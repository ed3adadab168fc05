"""`forewarn preflight`, as a person calls it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Said

Call = Callable[..., Said]

MODULE = """
import torch
from torch import nn

def parts(lr=0.01):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    inputs = torch.randn(96, 6)
    labels = inputs[:, :3].argmax(1)
    return model, torch.optim.Adam(model.parameters(), lr), list(zip(inputs.split(16), labels.split(16)))

def make():
    return parts()

def with_an_iterator():
    model, optimizer, data = parts()
    return {"model": model, "optimizer": optimizer, "data": iter(data), "loss": nn.CrossEntropyLoss()}

def as_in_my_loop():
    model, _, data = parts()
    optimizer = torch.optim.Adam(model.parameters(), 1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.01 * min(1.0, (step + 1) / 50))
    scaler = torch.amp.GradScaler("cpu")
    return {"model": model, "optimizer": optimizer, "data": data, "scaler": scaler, "scheduler": scheduler}

def without_a_rate():
    return parts(lr=0.0)

def layer_forgotten():
    model, _, data = parts()
    return model, torch.optim.Adam(model[0].parameters(), 0.01), data

def wrong():
    return 3

def raising():
    raise FileNotFoundError("no data here")
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "flown.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "flown", raising=False)


def test_a_sound_setup_is_0(forewarn: Call) -> None:
    said = forewarn("preflight", "flown:make", "--steps", "60")
    assert said.code == 0, said.out
    assert "Sequential: ready to train" in said.out
    assert "✓  parameters in optimizer" in said.out
    assert "Loss over the learning rate" in said.out


def test_something_to_look_at_is_1_and_says_what_to_do(forewarn: Call) -> None:
    said = forewarn("preflight", "flown:layer_forgotten", "--no-lr", "--steps", "20")
    assert said.code == 1, said.out
    assert "⚠  parameters in optimizer  2 of 4 tensors are in no optimizer group: 2.weight" in said.out
    assert "1. Add them to a group of the optimizer" in said.out


def test_what_will_not_train_is_2(forewarn: Call) -> None:
    said = forewarn("preflight", "flown:without_a_rate", "--steps", "20")
    assert said.code == 2
    assert "✗  learning rate" in said.out


def test_a_dict_with_an_iterator_and_json(forewarn: Call) -> None:
    said = forewarn("preflight", "flown:with_an_iterator", "--no-lr", "--steps", "20", "--total-steps", "500", "--json")
    result = json.loads(said.out)
    assert (said.code, result["exit_code"], result["verdict"], result["curve"]) == (0, 0, "ready to train", None)
    (duration,) = [check for check in result["checks"] if check["name"] == "time"]
    assert duration["numbers"]["total_steps"] == 500


def test_a_scaler_a_schedule_and_accumulation_are_taken_as_they_are(forewarn: Call) -> None:
    said = forewarn("preflight", "flown:as_in_my_loop", "--steps", "30", "--accumulate", "2", "--clip", "1", "--json")
    assert said.code == 0, said.out + said.err
    (rate,) = [check for check in json.loads(said.out)["checks"] if check["name"] == "learning rate"]
    assert rate["numbers"]["present"] == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("wrong", "flown:wrong returned a int; expected (model, optimizer, data)"),
        ("raising", "FileNotFoundError: no data here"),
        ("missing", "cannot be imported"),
    ],
)
def test_what_cannot_be_checked_is_3(forewarn: Call, function: str, words: str) -> None:
    said = forewarn("preflight", f"flown:{function}")
    assert said.code == 3
    assert words in said.err


def test_a_name_without_a_function_is_64(forewarn: Call) -> None:
    said = forewarn("preflight", "flown")
    assert said.code == 64
    assert "is not of the form module:function" in said.err
