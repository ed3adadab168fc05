import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

import forewarn
from forewarn.cli import cli
from forewarn.types import in_words
from tests.processes import skip_without_fsdp2

TINY = ["--width", "16", "--depth", "1", "--heads", "2", "--context", "16", "--batch-size", "4", "--log-interval", "10"]


def run(*arguments, expect=0):
    result = CliRunner().invoke(cli, ["train", "lm", *TINY, *map(str, arguments)])
    assert result.exit_code == expect, result.output + str(result.exception)
    return result.output


def test_help_teaches_in_groups():
    text = CliRunner().invoke(cli, ["train", "lm", "--help"]).output
    for words in (
        "Data:",
        "Training:",
        "Model:",
        "Weight monitor:",
        "Early stopping",
        "Evaluation",
        "Results:",
        "Examples:",
    ):
        assert words in text
    for option in (
        "--dataset", "--epochs", "--batch-size", "--lr", "--weight-decay", "--gradient-clip", "--log-interval",
        "--snapshot-interval", "--keep-last-n-snapshots", "--weight-monitor", "--weight-monitor-interval N",
        "--weight-monitor-sample-size SIZE", "--early-stopping", "--early-stop-patience", "--early-stop-min-delta",
        "--early-stop-restore-best", "--resume", "--device", "--seed", "--result-dir", "--max-steps",
    ):  # fmt: skip
        assert option in text


def parallel(how, folder):
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "forewarn", "train", "lm"]
    options = ["--parallel", how, "--max-steps", "12", "--weight-monitor", "--weight-monitor-interval", "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [sys.executable, *launch, *TINY, *options, "--result-dir", folder, "--model-name", how],
        capture_output=True, text=True, timeout=600, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("completed after 12 steps") == 1
    with forewarn.open_run(folder / how / "run") as stored:
        assert stored.end[0] == "completed"
        assert not [alert for alert in stored.alerts() if alert.code.startswith("X")]
        assert stored.scopes("rank/loss") == ("rank_0", "rank_1")
        assert len(stored.scopes("gradient/norm")) == len(stored.info.parameters)
        losses = stored.series("train/loss").values.tolist()
        assert f"completed after 12 steps: loss {in_words(losses[-1])}," in done.stdout
        return losses


@pytest.mark.ci
def test_two_processes_train_as_copies_with_shards_or_with_split_layers(tmp_path):
    skip_without_fsdp2()
    assert parallel("ddp", tmp_path) == pytest.approx(parallel("fsdp", tmp_path), rel=1e-4)
    run("--result-dir", tmp_path, "--max-steps", 12, "--weight-monitor", "--weight-monitor-interval", 2)
    with forewarn.open_run(tmp_path / "lm" / "run") as stored:
        alone = stored.series("train/loss").values.tolist()
    assert parallel("tp", tmp_path) == pytest.approx(alone, rel=1e-4)  # both train on one batch


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "needs several processes; start them with `torchrun --nproc-per-node 2 -m forewarn train lm --parallel"),
        (["--resume"], "saves no snapshots, so --resume and --snapshot-interval need a single process"),
        (["--gradient-monitor"], "--gradient-monitor needs whole gradients in each process: use --parallel ddp"),
    ],
)
def test_parallel_training_says_what_it_needs(tmp_path, options, words):
    assert words in run("--result-dir", tmp_path, "--parallel", "fsdp", *options, expect=3)
    assert not list(tmp_path.iterdir())


def test_it_trains_prints_lines_and_says_what_to_type_next(tmp_path):
    text = run("--result-dir", tmp_path, "--max_steps", 40, "--weight_monitor", "--weight-monitor-interval", 5)
    assert "epoch 1/1 | step 10/40 | loss " in text
    assert " | ema " in text
    assert " | norm " in text
    assert " | tok/s " in text
    assert "validation" in text
    assert text.count("step 40/40 | loss") == 1, "the validation loss does not repeat the line of its step"
    assert f"forewarn check {tmp_path}/lm/run" in text
    with forewarn.open_run(tmp_path / "lm" / "run") as stored:
        loss = stored.series("train/loss").values
        assert loss[-1] < loss[0]
        assert "update/ratio" in stored.names()


def test_a_text_of_your_own_and_tensorboard(tmp_path):
    text = tmp_path / "notes.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 500)
    run("--dataset", text, "--result-dir", tmp_path, "--max-steps", 12, "--tensorboard", "--weight-monitor")
    assert list((tmp_path / "lm" / "tensorboard").glob("events*"))


def test_early_stopping_is_told(tmp_path):
    text = run(
        "--result-dir", tmp_path, "--early-stopping", "--early-stop-patience", 1,
        "--early-stop-min-delta", 100, "--early-stop-restore-best", "--dataset", Path(__file__), "--epochs", 50,
    )  # fmt: skip
    assert "no improvement of the validation loss" in text


def test_what_each_epoch_brought_is_told(tmp_path):
    text = run("--result-dir", tmp_path, "--dataset", Path(__file__), "--epochs", 3, "--auto-adjust")
    assert "epoch 1: train " in text
    words = r"epoch 2: train [\d.]+, validation [\d.]+, improvement .*% \((poor|acceptable|good)\), gap "
    assert re.search(words, text)
    with forewarn.open_run(tmp_path / "lm" / "run") as stored:
        assert stored.series("evaluation/epoch").values.tolist() == [1, 2, 3]
        assert stored.info.hyperparameters["dropout"] == 0.0
        assert stored.info.hyperparameters["width"] == 16


def test_an_earlier_result_is_never_overwritten_and_resume_goes_on_with_the_newest(tmp_path):
    for _ in range(2):
        run("--result-dir", tmp_path, "--max-steps", 3)
    text = run("--result-dir", tmp_path, "--max-steps", 5, "--resume")
    assert "resuming at step 3\n" in text
    assert f"Results are in {tmp_path}/lm-2." in text
    for name, steps in (("lm", 3), ("lm-2", 5)):
        with forewarn.open_run(tmp_path / name / "run") as stored:
            assert stored.num_steps == steps


def test_overwrite_begins_again_in_the_same_place(tmp_path):
    run("--result-dir", tmp_path, "--max-steps", 3)
    text = run("--result-dir", tmp_path, "--max-steps", 2, "--overwrite")
    assert f"Results are in {tmp_path}/lm." in text
    with forewarn.open_run(tmp_path / "lm" / "run") as stored:
        assert stored.num_steps == 2
    assert "give one of them" in run("--result-dir", tmp_path, "--overwrite", "--resume", expect=3)


def test_a_different_model_and_a_missing_text_are_one_sentence_each(tmp_path):
    run("--result-dir", tmp_path, "--max-steps", 3)
    assert "different model" in run("--result-dir", tmp_path, "--depth", 2, "--resume", expect=3)
    assert "nowhere.txt" in run("--dataset", "nowhere.txt", "--result-dir", tmp_path / "x", expect=3)
    assert "width" in run("--width", 17, "--result-dir", tmp_path / "y", expect=3)


def test_a_device_that_is_not_there_is_one_sentence(tmp_path):
    text = run("--device", "cuda", "--result-dir", tmp_path, expect=3)
    assert "device 'cuda' cannot be used here" in text
    assert not (tmp_path / "lm").exists()


def test_wikitext_without_its_package_ends_with_one_clear_sentence(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    text = run("--dataset", "wikitext", "--result-dir", tmp_path, expect=3)
    assert "pip install datasets" in text
    assert len(text.strip().splitlines()) == 1


def test_resume_goes_on_to_the_same_end_as_one_run(tmp_path):
    run("--result-dir", tmp_path / "whole", "--max-steps", 30, "--snapshot-interval", 15)
    run("--result-dir", tmp_path / "parts", "--max-steps", 30, "--snapshot-interval", 15)
    snapshots = tmp_path / "parts" / "lm" / "snapshots"
    (snapshots / "step-00000030.pt").unlink()
    run("--result-dir", tmp_path / "parts", "--max-steps", 30, "--snapshot-interval", 15, "--resume")
    with forewarn.open_run(tmp_path / "whole/lm/run") as whole, forewarn.open_run(tmp_path / "parts/lm/run") as parts:
        assert whole.series("train/loss").values.tolist() == parts.series("train/loss").values.tolist()


def test_ctrl_c_saves_a_snapshot_and_ends_cleanly(tmp_path):
    command = [sys.executable, "-m", "forewarn", "train", "lm", *TINY, "--result-dir", str(tmp_path), "--epochs", "100"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               env={**os.environ, "OMP_NUM_THREADS": "1"})  # fmt: skip
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and "step 20/" not in (line := process.stderr.readline()):
        assert line, process.communicate()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "interrupted by Ctrl-C" in out
    assert "--resume" in out
    assert len(list((tmp_path / "lm" / "snapshots").glob("step-*.pt"))) == 1
    with forewarn.open_run(tmp_path / "lm" / "run") as stored:
        before = stored.last_step
    run("--result-dir", tmp_path, "--epochs", 100, "--max-steps", before + 5, "--resume")
    with forewarn.open_run(tmp_path / "lm" / "run") as stored:
        assert stored.series("train/loss").steps.tolist() == list(range(before + 5))


@pytest.mark.parametrize(("option", "value"), [("--lr", "0"), ("--epochs", "0"), ("--amp", "int4")])
def test_values_out_of_range_are_refused(tmp_path, option, value):
    result = CliRunner().invoke(cli, ["train", "lm", "--result-dir", str(tmp_path), option, value])
    assert result.exit_code == 2
    assert option in result.output


def test_resume_takes_the_run_that_is_named_or_else_the_newest_that_can_go_on(tmp_path):
    for _ in range(2):
        run("--result-dir", tmp_path, "--max-steps", 3)
    text = run("--result-dir", tmp_path, "--model-name", "lm", "--max-steps", 5, "--resume")
    assert f"Results are in {tmp_path}/lm." in text
    (tmp_path / "lm-3").mkdir()
    text = run("--result-dir", tmp_path, "--max-steps", 5, "--resume")
    assert f"Results are in {tmp_path}/lm-2." in text


def test_a_name_with_slashes_is_refused(tmp_path):
    assert "without slashes" in run("--result-dir", tmp_path, "--model-name", "sizes/small", expect=3)


def test_gradients_and_layers_are_printed_and_snapshots_deleted_if_asked_for(tmp_path):
    text = run("--result-dir", tmp_path, "--max-steps", 20, "--gradient-monitor", "--log-layers", 20,
               "--snapshot-interval", 0, "--delete-snapshots-after-training")  # fmt: skip
    assert "step 10: gradient norm " in text
    assert " | layers: mean " in text
    assert "norm of a layer:" in text
    assert re.search(r"step 20 +norm +mean +std +ratio", text)
    assert re.search(r"blocks\.0\.\S+weight( +\S+){4}\n", text)
    assert not list((tmp_path / "lm").glob("snapshots/step-*"))


def test_the_monitor_is_set_by_a_file_and_options_that_are_given_win(tmp_path):
    settings = tmp_path / "monitor.toml"
    settings.write_text(
        "[thresholds.overfitting]\ngap = 0.7\n[thresholds.validation_plateau]\nwindow = 6\n"
        "[measure]\nblocks = 'blocks.0'\n"
    )
    run("--result-dir", tmp_path, "--max-steps", 3, "--monitor-config", settings, "--plateau-window", 4)
    with forewarn.open_run(tmp_path / "lm" / "run") as stored:
        assert stored.config["thresholds"]["overfitting"]["gap"] == 0.7
        assert stored.config["thresholds"]["validation_plateau"]["window"] == 4
        assert stored.config["measure"]["blocks"] == "blocks.0"
    settings.write_text("[thresholds.overfiting]\n")
    text = run("--result-dir", tmp_path, "--monitor-config", settings, expect=3)
    assert "did you mean 'overfitting'" in text
    assert "none.toml" in run("--result-dir", tmp_path, "--monitor-config", tmp_path / "none.toml", expect=3)
