"""`forewarn check`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from forewarn.config import Config
from forewarn.measure.options import Measure
from forewarn.store import RunWriter
from tests.cli.conftest import FACTS, LAYERS, Said, block, blocks_of, falling, write_run

Call = Callable[..., Said]


def test_a_healthy_run_passes_with_every_point_ticked(forewarn: Call, healthy: Path) -> None:
    said = forewarn("check", healthy)
    assert said.code == 0
    assert "healthy: no alerts" in said.out
    assert "✓  loss falling" in said.out
    assert "–  memory stable" in said.out
    assert "✗" not in said.out
    assert f"forewarn show {healthy}" in said.out.replace("\n", "")
    assert said.err == ""


def test_a_lost_run_is_critical_and_says_what_to_do(forewarn: Call, lost: Path) -> None:
    said = forewarn("check", lost)
    assert said.code == 2
    assert said.out.index("critical") < said.out.index("What to do") < said.out.index("Health checks")
    assert "loss-spike L102" in said.out
    assert "from 0.001 to 0.0005" in said.out, "the remedy has the numbers of this run"
    assert "open since step 300, last seen at step 3" in said.out
    assert "✗  loss falling" in said.out
    assert "forewarn explain " in said.out


def test_the_numbers_are_those_at_firing_and_the_step_last_seen_stands_below(forewarn: Call, tmp_path: Path) -> None:
    said = forewarn("check", write_run(tmp_path / "run", [*falling(200), 3.5, 3.25]))
    assert "   loss 3.5 · limit " in said.out
    assert "open since step 200, last seen at step 201\n" in said.out
    steady = forewarn("check", write_run(tmp_path / "steady", [*falling(200), 3.5, 2.0]))
    assert "open since step 200\n" in steady.out


def test_a_run_with_information_alone_has_no_warnings(forewarn: Call, tmp_path: Path) -> None:
    said = forewarn("check", write_run(tmp_path / "run", [*falling(200), 3.5, 2.0, 2.0]))
    assert "✓  no open warnings" in said.out
    assert "  1 note open\n" in said.out


def test_json_gives_readings_as_they_were_and_times_whole(forewarn: Call, lost: Path) -> None:
    said = forewarn("check", lost, "--json")
    found = json.loads(said.out)
    lowered = next(one for one in found["alerts"][0]["remedies"] if one["action"] == "lower_lr")
    assert lowered["parameters"] == {"from": 0.001, "to": 0.0005}
    assert abs(found["end"]["time"] - time.time()) < 60, "not rounded to float32, which is minutes"


@pytest.mark.parametrize("columns", [60, 100])
def test_a_pipe_is_as_wide_as_the_environment_says(
    forewarn: Call, lost: Path, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    widest = max(map(len, forewarn("explain", "L102").out.splitlines()))
    assert columns - 10 < widest <= columns


def test_a_critical_alert_that_was_resolved_is_a_warning(forewarn: Call, tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", [*falling(200), 5000.0, *falling(200)[-100:]])
    said = forewarn("check", path)
    assert said.code == 1
    assert "warnings: 1 critical resolved" in said.out


def test_information_alone_is_healthy_and_asks_for_nothing(forewarn: Call, tmp_path: Path) -> None:
    said = forewarn("check", write_run(tmp_path / "run", [*falling(200), 3.5, 2.0, 2.0]))
    assert said.code == 0
    assert "healthy: 1 note open" in said.out
    assert "What to do" not in said.out


def test_many_layers_are_one_entry_and_symptoms_stand_under_their_cause(forewarn: Call, tmp_path: Path) -> None:
    layers = tuple(f"layers.{at}" for at in range(500))
    writer = RunWriter(tmp_path / "run", info=FACTS, config=Config().to_dict())
    for step in range(60):
        ratio = 1e-3 if step < 50 else 0.9
        writer.append(
            step,
            [
                block(step, "train/lr", 1e-3, scopes=("0",)),
                block(step, "update/ratio", *[ratio + 1e-4 * at for at in range(500)], scopes=layers),
                block(step, "monitor/update_ratio_median", ratio),
            ],
        )
    writer.close()
    said = forewarn("check", tmp_path / "run")
    assert said.code >= 1
    assert len(said.out.splitlines()) < 60
    cause, symptom = (
        next(line for line in said.out.splitlines() if line.endswith(name))
        for name in ("update-ratio-jump U104", "update-ratio-high U102")
    )
    assert cause.startswith("⚠  ")
    assert symptom.startswith("   ⚠  ")


def test_names_are_shown_literally_and_control_characters_written_out(forewarn: Call, healthy: Path) -> None:
    said = forewarn("check", healthy)
    assert "[b]Net\\x07" in said.out
    assert "\x07" not in said.out


def test_json_is_one_object_without_anything_that_is_not_json(forewarn: Call, tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", [*falling(200), float("nan"), float("inf")])
    said = forewarn("check", path, "--json")
    found = json.loads(said.out, parse_constant=pytest.fail)
    assert found["exit_code"] == said.code == 2
    assert found["verdict"] == "critical"
    assert found["last_step"] == 201
    assert found["end"]["reason"] == "completed"
    assert found["alerts"][0]["code"] == "L101"
    assert found["alerts"][0]["finding"]["value"] is None, "non-finite numbers are null"
    assert found["checklist"][0] == {
        "name": "loss falling",
        "state": "fail",
        "detail": "the last loss is ∞; open: non-finite-loss",
    }


def test_another_config_changes_the_verdict(forewarn: Call, lost: Path, tmp_path: Path) -> None:
    toml = tmp_path / "lax.toml"
    toml.write_text('disable = ["loss-spike", "loss-divergence"]\n')
    assert forewarn("check", lost, "--config", toml).code == 0


@pytest.fixture
def stalled(tmp_path: Path) -> Path:
    """A run whose last layer moves by 1e-4 of its size, with two epochs of the same validation loss."""
    config = Config(measure=Measure(sample_size=1024), hyperparameters={"dropout": 0.1})
    writer = RunWriter(tmp_path / "stalled", info=FACTS, config=config.to_dict())
    for step, loss in enumerate(falling(60)):
        blocks = blocks_of(step, loss)
        if step % 10 == 0:
            blocks = [one for one in blocks if one.name != "update/ratio"]
            blocks += [
                block(step, "update/ratio", 1e-3, 2e-3, 1e-4, scopes=LAYERS),
                block(step, "update/stopped_by", 0.0, 0.0, 0.0, scopes=LAYERS),
                block(step, "update/frozen_cause", 0.0, 0.0, 0.0, scopes=LAYERS),
            ]
        if step in (20, 40):
            losses = {"evaluation/train_loss": 1.0, "eval/loss": 1.0, "evaluation/plateau_detected": 0.0}
            blocks += [block(step, name, value) for name, value in losses.items()]
            blocks.append(block(step, "evaluation/epoch", step / 20))
        writer.append(step, blocks)
    writer.close("completed")
    return tmp_path / "stalled"


def test_other_bounds_give_another_answer_though_the_readings_were_made_under_the_old_ones(
    forewarn: Call, stalled: Path, tmp_path: Path
) -> None:
    before = forewarn("check", stalled)
    assert before.code == 0
    assert "frozen-weight" not in before.out
    assert "plateau" not in before.out
    toml = tmp_path / "strict.toml"
    toml.write_text(
        "[thresholds.frozen_weight]\nratio = 5e-4\npatience = 5\n[thresholds.validation_plateau]\nwindow = 2\n"
    )
    after = forewarn("check", stalled, "--config", toml, "--json")
    alerts = {alert["name"]: alert for alert in json.loads(after.out)["alerts"]}
    assert after.code == 1
    assert alerts["frozen-weight"]["since"] == 40
    assert alerts["frozen-weight"]["finding"]["bound"] == 5e-4
    assert "epoch 2: train 1, validation 1, plateau" in forewarn("check", stalled, "--config", toml).out


@pytest.mark.parametrize(
    "text",
    ["", "[measure]\nsample_size = 1024\n", "[hyperparameters]\ndropout = 0.1\n", "[measure.plan]\ntotal = 0\n"],
)
def test_a_config_may_say_how_the_run_was_measured(forewarn: Call, stalled: Path, tmp_path: Path, text: str) -> None:
    toml = tmp_path / "same.toml"
    toml.write_text(text)
    assert forewarn("check", stalled, "--config", toml).code == 0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[measure]\nsample_size = 64", "[measure] sample_size = 64 cannot be changed afterwards: {} with 1024;"),
        ("[measure.plan]\ntotal = 9", "[measure] plan.total = 9 cannot be changed afterwards: {} with 0;"),
        (
            "[hyperparameters]\ndropout = 0.2",
            "[hyperparameters] dropout = 0.2 cannot be changed afterwards: {} with 0.1;",
        ),
        ("[hyperparameters]\nwidth = 64", "[hyperparameters] width = 64 cannot be changed afterwards: {} without it;"),
    ],
)
def test_what_was_measured_cannot_be_changed_afterwards(
    forewarn: Call, stalled: Path, tmp_path: Path, text: str, words: str
) -> None:
    toml = tmp_path / "other.toml"
    toml.write_text(text)
    said = forewarn("check", stalled, "--config", toml)
    assert said.code == 3
    assert words.format("the run was measured") + " remove this setting" in said.err
    assert said.err.count("\n") == 1
    assert said.out == ""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("disable = 3 4", "is not valid TOML"),
        ("sample_sizes = 3", "did you mean 'measure.sample_size'"),
        ("history_window = 'many'", "must be int"),
        ("sample_size = 3", "sample_size moved to [measure]: write measure.sample_size"),
        ('disable = ["no-such-rule"]', "there is no rule"),
    ],
)
def test_a_config_that_cannot_be_used_is_one_sentence(
    forewarn: Call, healthy: Path, tmp_path: Path, text: str, words: str
) -> None:
    toml = tmp_path / "bad.toml"
    toml.write_text(text)
    said = forewarn("check", healthy, "--config", toml)
    assert said.code == 3
    assert words in said.err
    assert said.err.count("\n") == 1
    assert said.out == ""


def test_a_missing_config_and_a_missing_run_are_one_sentence(forewarn: Call, healthy: Path, tmp_path: Path) -> None:
    for arguments in (["check", healthy, "--config", tmp_path / "no.toml"], ["check", tmp_path / "nope", "--json"]):
        said = forewarn(*arguments)
        assert said.code == 3
        assert said.err.startswith("Error: ")
        assert said.err.count("\n") == 1
        assert said.out == ""


def test_a_damaged_run_is_one_sentence(forewarn: Call, healthy: Path) -> None:
    database = healthy / "run.db"
    content = bytearray(database.read_bytes())
    content[100:] = os.urandom(len(content) - 100)
    database.write_bytes(content)
    said = forewarn("check", healthy)
    assert said.code == 3
    assert said.err.count("\n") == 1
    assert "Traceback" not in said.err


def test_a_run_that_still_trains_can_be_checked(forewarn: Call, tmp_path: Path) -> None:
    said = forewarn("check", write_run(tmp_path / "run", falling(100), end=None))
    assert said.code == 0
    assert ", running\n" in said.out


def test_a_reader_that_stops_early_does_not_change_the_exit_code(lost: Path) -> None:
    command = f"{sys.executable} -m forewarn check {lost} | true; exit ${{PIPESTATUS[0]}}"
    ended = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr == ""


def test_an_output_that_knows_only_ascii_gets_an_answer(lost: Path) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "forewarn", "check", str(lost)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert ended.returncode == 2
    assert "loss-spike L102" in ended.stdout


def test_a_run_that_learns_nothing_is_not_called_healthy(forewarn: Call, tmp_path: Path) -> None:
    said = forewarn("check", write_run(tmp_path / "run", [2.3] * 200))
    assert said.code == 0
    assert "no warnings, but the loss is not falling: no alerts" in said.out
    assert "healthy:" not in said.out
