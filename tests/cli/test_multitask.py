import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import forewarn
from forewarn.cli import cli

SMALL = ["--epochs", "2", "--samples", "200"]


def run(*arguments, expect=0):
    result = CliRunner().invoke(cli, ["train", "multitask", *map(str, arguments)])
    assert result.exit_code == expect, result.output + str(result.exception)
    return result.output


def test_help_teaches():
    text = run("--help")
    for option in (
        "--monitor-gradients / --no-monitor-gradients", "--gradient-log-freq N", "--device", "--epochs",
        "--predict-pointers / --no-predict-pointers", "--task-weight TASK=WEIGHT", "--balance", "Examples:", "Tasks:",
    ):  # fmt: skip
        assert option in text


def test_it_trains_shows_the_gradients_and_ends_with_a_summary(tmp_path):
    text = run(*SMALL, "--result-dir", tmp_path / "it")
    assert "epoch 2/2" in text
    assert "gradients  norm " in text
    assert "tasks      pointer " in text
    assert "Gradients over the whole run" in text
    assert re.search(r"gradient norm +mean [\d.]+ ± [\d.]+, highest [\d.]+ in step \d", text)
    assert "task balance      too early to tell (1 of 10 checks): pointer/type " in text
    checked = CliRunner().invoke(cli, ["check", str(tmp_path / "it" / "run")])
    assert "–  tasks even" in checked.output
    assert "too early to tell (1 of 11 checks), gradients pointer/type " in checked.output
    assert f"forewarn check {tmp_path}/it/run" in text
    with forewarn.open_run(tmp_path / "it" / "run") as stored:
        assert stored.scopes("eval/task_loss") == ("pointer", "type")


def test_a_starved_task_is_told_a_snapshot_is_saved_and_check_agrees(tmp_path):
    text = run("--epochs", 5, "--task-weight", "type=0.001", "--result-dir", tmp_path / "it")
    assert "✖ step 100  " in text
    assert "task-collapse" in text
    assert "  do     Raise the weight of task type from 0.001 to " in text
    assert "snapshot: " in text
    assert list((tmp_path / "it" / "snapshots").glob("step-*.pt"))
    checked = CliRunner().invoke(cli, ["check", str(tmp_path / "it" / "run")])
    assert checked.exit_code == 2
    assert "task-collapse T102" in checked.output
    assert "✗  tasks even" in checked.output


def test_an_earlier_result_is_never_overwritten(tmp_path):
    for _ in range(2):
        run(*SMALL, "--no-predict-pointers", "--result-dir", tmp_path / "it")
    assert (tmp_path / "it-2" / "run").exists()


def test_without_monitoring_nothing_is_measured_or_stored(tmp_path):
    text = run(*SMALL, "--no-monitor-gradients", "--result-dir", tmp_path / "it")
    assert "epoch 2/2" in text
    assert "gradients" not in text
    assert not (tmp_path / "it").exists()


def test_balance_moves_the_weights(tmp_path):
    run(*SMALL, "--balance", "gradnorm", "--task-weight", "pointer=10", "--result-dir", tmp_path / "it")
    with forewarn.open_run(tmp_path / "it" / "run") as stored:
        weights = stored.series("task/weight", "pointer").values
    assert weights[-1] < weights[0] < 2


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--task-weight", "alpha=1"], 2, "is not a task"),
        (["--task-weight", "type=big"], 2, "is not a number"),
        (["--task-weight", "type=0"], 2, "above 0"),
        (["--balance", "gradnorm", "--no-monitor-gradients"], 3, "needs the gradients"),
        (["--no-predict-pointers", "--task-weight", "pointer=2"], 3, "conflicts with --no-predict-pointers"),
        (["--device", "cuda"], 3, "cannot be used here"),
    ],
)
def test_what_makes_no_sense_is_one_sentence(arguments, code, words):
    assert words in run(*arguments, expect=code)


def test_the_example_script_runs(tmp_path):
    script = Path(__file__).parent.parent.parent / "examples" / "multitask.py"
    command = [sys.executable, str(script), "--epochs", "1", "--result-dir", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "of all sequences" in ended.stdout
