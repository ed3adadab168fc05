"""Logs that the real tools wrote: what is read is what was logged, and check says the same of a log and of its run."""

import csv
import gzip
import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from torch.utils.tensorboard import SummaryWriter

from forewarn.importing import LogError, find_logs, import_log
from forewarn.store import open_run

LOGS = Path(__file__).parent / "logs"


def falling(steps, noise=0.05, seed=0):
    """A loss as of a healthy run."""
    rng = np.random.default_rng(seed)
    return 1.0 + 3.0 * np.exp(-np.asarray(steps) / 300.0) + rng.normal(0, noise, len(steps))


def read_one(path):
    (log,) = find_logs(path)
    return log.read()


def run_of(path, folder, **settings):
    import_log(read_one(path), folder / "imported", **settings)
    return open_run(folder / "imported")


def checked(forewarn, *arguments):
    said = forewarn("check", *map(str, arguments), "--json")
    assert said.code in (0, 1, 2), said.err
    return json.loads(said.out)


def codes(answer, *, warnings=True):
    severities = ("warning", "critical") if warnings else ("info", "warning", "critical")
    return {alert["code"] for alert in answer["alerts"] if alert["severity"] in severities}


@pytest.mark.parametrize("new_style", [False, True])
def test_what_tensorboard_holds_is_read_with_its_times(tmp_path, new_style):
    steps = list(range(0, 500, 10))
    losses = falling(steps)
    with SummaryWriter(tmp_path / "tb") as writer:
        for step, loss in zip(steps, losses, strict=True):
            writer.add_scalar("train/loss", loss, step, walltime=1.7e9 + step, new_style=new_style)
            writer.add_scalar("lr-AdamW", 1e-3, step, walltime=1.7e9 + step, new_style=new_style)
            writer.add_histogram("weights", np.arange(9.0), step)
            writer.add_text("note", "hello", step)
    with run_of(tmp_path / "tb", tmp_path) as run:
        series = run.series("train/loss")
        assert series.steps.tolist() == steps
        assert series.values.tolist() == losses.astype(np.float32).tolist()
        assert series.times.tolist() == [1.7e9 + step for step in steps]
        assert run.series("train/lr", "0").values.tolist() == [np.float32(1e-3)] * len(steps)
        assert not {"weights", "note"} & set(run.names())


def test_event_files_of_one_folder_are_one_run_and_a_resumed_one_replaces_what_came_after(tmp_path):
    for first, last, loss in ((0, 100, 2.0), (50, 80, 1.0)):
        with SummaryWriter(tmp_path, filename_suffix=f".{first}") as writer:
            for step in range(first, last):
                writer.add_scalar("loss", loss, step)
    with run_of(tmp_path, tmp_path / "out") as run:
        assert run.series("train/loss").steps.tolist() == list(range(80))
        assert run.series("train/loss").values.tolist() == [2.0] * 50 + [1.0] * 30


def test_check_says_the_same_of_a_log_and_of_the_imported_run(tmp_path, forewarn):
    steps = list(range(0, 4000, 10))
    losses = np.where(np.arange(400) < 300, falling(steps), 6.0 + 0.001 * np.arange(400))
    with open(tmp_path / "train.csv", "w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["step", "train_loss", "lr", "grad_norm"])
        table.writerows([step, loss, 1e-3, 1.0] for step, loss in zip(steps, losses, strict=True))
    said = forewarn("import", str(tmp_path / "train.csv"), "--out", str(tmp_path / "run"))
    assert said.code == 0
    assert "train/loss" in said.out
    of_log, of_run = checked(forewarn, tmp_path / "train.csv"), checked(forewarn, tmp_path / "run")
    assert "L107" in codes(of_log)
    assert {**of_log, "run": "", "end": ""} == {**of_run, "run": "", "end": ""}


def test_an_imported_run_is_shown_listed_compared_and_reported_like_any_other(tmp_path, forewarn):
    for name, seed in (("a", 0), ("b", 1)):
        rows = [{"step": step, "loss": loss} for step, loss in enumerate(falling(range(400), seed=seed).tolist())]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    log = str(tmp_path / "a.jsonl")
    assert forewarn("import", log, "--out", str(tmp_path / "runs" / "a")).code == 0
    run = str(tmp_path / "runs" / "a")
    for path in (log, run):
        assert "loss" in forewarn("show", path).out
        assert forewarn("compare", path, str(tmp_path / "b.jsonl")).code == 0
        assert json.loads(forewarn("report", path, "--json").out)
    assert "imported" in forewarn("ls", str(tmp_path / "runs")).out


def test_logs_are_compared_with_their_alerts(tmp_path, forewarn):
    for name, jump in (("a", 0.0), ("b", 5.0)):
        losses = falling(range(400)) + jump * (np.arange(400) >= 250)
        rows = [f"{step},{loss}\n" for step, loss in enumerate(losses)]
        (tmp_path / f"{name}.csv").write_text("step,loss\n" + "".join(rows))
    said = " ".join(forewarn("compare", str(tmp_path / "a.csv"), str(tmp_path / "b.csv")).out.split())
    assert "No run has alerts" not in said
    assert "b.csv has loss-" in said


def test_times_that_a_log_does_not_have_stay_unknown(tmp_path):
    (tmp_path / "log.csv").write_text("step,loss\n" + "".join(f"{step},1.0\n" for step in range(5)))
    with run_of(tmp_path / "log.csv", tmp_path) as run:
        assert np.isnan(run.series("train/loss").times).all()
        assert run.info.started == 0.0


def test_torchtitan_prints_what_is_judged(tmp_path, forewarn):
    """The file was printed by `MetricsProcessor.log` of torchtitan 0.1.0, colors included."""
    with run_of(LOGS / "torchtitan.log", tmp_path) as run:
        series = run.series("train/loss")
        expected = [10.8 * math.exp(-step / 400) + 2 + 0.05 * math.sin(step) for step in [1, *range(10, 1000, 10)]]
        assert series.steps.tolist() == [1, *range(10, 1000, 10)]
        assert np.allclose(series.values, expected, atol=1e-4)
        assert run.series("logged/memory").values[0] == np.float32(1.91)
    assert codes(checked(forewarn, LOGS / "torchtitan.log")) == set()


def test_nanogpt_prints_what_is_judged(tmp_path, forewarn):
    """The file was printed by `train.py` of nanoGPT (3adf61e), on a small text."""
    with run_of(LOGS / "nanogpt.log", tmp_path) as run:
        series = run.series("train/loss")
        assert series.steps.tolist() == list(range(0, 700, 10))
        assert series.values[[0, 1]].tolist() == [np.float32(4.8285), np.float32(4.6507)]
        assert run.series("eval/loss").steps.tolist() == list(range(0, 700, 100))
        assert run.series("speed/step_seconds").values[0] == np.float32(6.18646)
    answer = checked(forewarn, LOGS / "nanogpt.log")
    assert codes(answer) == set()
    assert answer["verdict"] == "healthy"


def test_a_run_of_nanogpt_that_diverged_is_critical(forewarn):
    """The same script at a learning rate of 30: its loss rises to 1e9, and is NaN from step 23 on."""
    answer = checked(forewarn, LOGS / "nanogpt-diverged.log")
    assert codes(answer) == {"L101"}
    assert answer["alerts"][0]["since"] == 23
    assert answer["exit_code"] == 2


PRINTED = {
    "torchtitan": (
        "[titan] 2026-03-01 12:00:00,123 - root - INFO - \x1b[31mstep: 20  \x1b[32mloss:  8.12340  "
        "\x1b[38;2;180;60;0mgrad_norm:  1.2500  \x1b[38;2;54;234;195mmemory:  1.91GiB(2.01%)  \x1b[34mtps: 12,345  "
        "\x1b[36mmfu: 1.2%\x1b[39m",
        {"train/loss": 8.1234, "gradient/global_norm": 1.25, "logged/tps": 12345.0},
    ),
    "torchtitan's validation": (
        "[titan] - root - INFO - \x1b[33mvalidate step: 20  loss:  7.5000  tps: 9",
        {"eval/loss": 7.5},
    ),
    "nanoGPT": ("iter 20: loss 2.1234, time 12.34ms, mfu 3.00%", {"train/loss": 2.1234, "speed/step_seconds": 0.01234}),
    "nanoGPT's evaluation": ("step 20: train loss 1.9000, val loss 2.0000", {"eval/loss": 2.0}),
    "Megatron-LM": (
        " [2026-01-01 10:00:00] iteration       20/   500000 | consumed samples:         1280 | elapsed time per "
        "iteration (ms): 1234.5 | learning rate: 1.000000E-05 | lm loss: 1.063921E+01 | grad norm: 5.125 | number of "
        "nan iterations:   0 |",
        {"train/loss": 10.63921, "train/lr": 1e-5, "gradient/global_norm": 5.125, "speed/step_seconds": 1.2345},
    ),
    "Megatron-LM's validation": (" validation loss at iteration 20 | lm loss value: 3.1E+00 | ", {"eval/loss": 3.1}),
    "litGPT": (
        "Epoch 1 | iter 40 step 20 | loss train: 10.123, val: 9.5 | iter time: 100.0 ms (step) remaining time: 0:12:34",
        {"train/loss": 10.123, "eval/loss": 9.5, "speed/step_seconds": 0.1},
    ),
    "llm.c": (
        "step   20/19560 | loss 10.98 (+nanz)| norm 15.5 (+nanz)| lr 8.50e-07 | 1234.5 ms | 56% bf16 MFU | 425k tok/s",
        {"train/loss": 10.98, "gradient/global_norm": 15.5, "train/lr": 8.5e-7},
    ),
    "modded-nanogpt": ("step:20/1750 val_loss:4.25 train_time:123ms step_avg:12.1ms", {"eval/loss": 4.25}),
    "OLMo": (
        "[step=20/1000,epoch=0]\n    train/CrossEntropyLoss=10.125\n    optim/total_grad_norm=0.5",
        {"train/loss": 10.125, "gradient/global_norm": 0.5},
    ),
    "PyTorch's ImageNet example": (
        "Epoch: [0][  20/1000]\tTime  0.312 ( 0.330)\tLoss 7.1234e+00 (7.2000e+00)\tAcc@1   3.12 (  2.20)",
        {"train/loss": 7.1234, "logged/Acc_1": 3.12},
    ),
    "PyTorch's MNIST example": ("Train Epoch: 1 [20/60000 (0%)]\tLoss: 2.125000", {"train/loss": 2.125}),
    "MMDetection": (
        "2026-01-01 10:00:00,000 - mmdet - INFO - Epoch [1][20/1000]\tlr: 2.000e-02, eta: 1:02:03, loss: 1.2500, "
        "grad_norm: 2.5",
        {"train/loss": 1.25, "train/lr": 0.02, "gradient/global_norm": 2.5},
    ),
    "a tutorial": ("Epoch [3/10], Step [20/600], Loss: 1.2500", {"train/loss": 1.25}),
    "a bar of tqdm": (
        "\rEpoch 0:   5%|5         | 10/200 [00:03<00:03, 61.12it/s]"
        "\rEpoch 0:  10%|#         | 20/200 [00:03<00:03, 61.12it/s, v_num=0, train_loss=1.250]",
        {"train/loss": 1.25},
    ),
    "a loss that is lost": ("iter 20: loss nan, time 12.34ms", {"train/loss": math.nan}),
}


@pytest.mark.parametrize("tool", PRINTED)
def test_the_lines_that_training_scripts_print_are_read(tool, tmp_path):
    """The notations are those of the tools' own format strings."""
    printed, expected = PRINTED[tool]
    (tmp_path / "train.log").write_text(f"loading 3 files\nnumber of parameters: 10.65M\n{printed}\nsaved in 12 s\n")
    with run_of(tmp_path / "train.log", tmp_path) as run:
        for metric, value in expected.items():
            series = run.series(metric, "0" if metric == "train/lr" else "")
            assert series.steps.tolist() == [20]
            assert series.values.tolist() == pytest.approx([value], nan_ok=True, rel=1e-6)


def test_hugging_faces_output_is_read_row_by_row_beside_its_progress_bar(tmp_path):
    """As tqdm and `Trainer` write to one terminal: fractional epochs, some of them whole, and no step."""
    rows = [
        f"\r  1%|          | {10 * row}/1000 [00:01<00:30, 19.5it/s]\r{' ' * 60}\r"
        f"{{'loss': '{3 - row / 50}', 'grad_norm': '1.5', 'learning_rate': '5e-05', 'epoch': '{row / 10}'}}\n"
        for row in range(1, 101)
    ]
    (tmp_path / "train.log").write_text("".join(rows))
    with run_of(tmp_path / "train.log", tmp_path) as run:
        losses = run.series("train/loss")
        assert losses.steps.tolist() == list(range(100))
        assert losses.values.tolist() == [np.float32(3 - row / 50) for row in range(1, 101)]
        assert not run.info.step_is_epoch


def test_printed_epochs_are_judged_by_epochs_and_batches_by_rows(tmp_path):
    (tmp_path / "epochs.log").write_text(
        "".join(f"Epoch {epoch}/30, Loss: {2 - epoch / 30}, Val Loss: 2.5\n" for epoch in range(1, 31))
    )
    (tmp_path / "batches.csv").write_text("epoch,loss\n" + "".join(f"{row // 10},{row}\n" for row in range(50)))
    with run_of(tmp_path / "epochs.log", tmp_path / "a") as run:
        assert run.info.step_is_epoch
        assert run.series("train/loss").steps.tolist() == list(range(1, 31))
        assert len(run.series("eval/loss")) == 30
    with run_of(tmp_path / "batches.csv", tmp_path / "b") as run:
        assert not run.info.step_is_epoch
        assert run.series("train/loss").steps.tolist() == list(range(50))


ROWS = [(step, 3.5 - step / 100) for step in range(0, 200, 10)]
TABLES = {
    "semicolons and decimal commas": (
        "a.csv",
        "step;loss\n" + "".join(f"{s};{v}\n".replace(".", ",") for s, v in ROWS),
    ),
    "bars": ("a.csv", "step|loss\n" + "".join(f"{s}|{v}\n" for s, v in ROWS)),
    "UTF-16": ("a.csv", ("step,loss\n" + "".join(f"{s},{v}\n" for s, v in ROWS)).encode("utf-16")),
    "UTF-16 output": ("a.log", "".join(f"iter {s}: loss {v}\n" for s, v in ROWS).encode("utf-16")),
    "a chart of W&B": (
        "a.csv",
        '"Step","gpt - train/loss","gpt - train/loss__MIN"\n' + "".join(f'"{s}","{v}","1.0"\n' for s, v in ROWS),
    ),
    "a list": ("a.json", json.dumps([{"step": s, "train": {"loss": v}} for s, v in ROWS])),
    "a log history": ("a.json", json.dumps([{"step": s, "loss": v, "epoch": s / 7} for s, v in ROWS], indent=1)),
}


@pytest.mark.parametrize("kind", TABLES)
def test_tables_of_many_kinds_are_read(kind, tmp_path):
    name, content = TABLES[kind]
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with run_of(tmp_path / name, tmp_path) as run:
        losses = run.series("train/loss")
        assert losses.steps.tolist() == [step for step, _ in ROWS]
        assert losses.values.tolist() == [np.float32(value) for _, value in ROWS]


def test_lists_by_name_are_a_history_of_rows(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps({"loss": [3.0, 2.0, 1.0], "val_loss": [3.0, 2.5, 2.0]}))
    with run_of(tmp_path / "a.json", tmp_path) as run:
        assert run.series("train/loss").values.tolist() == [3.0, 2.0, 1.0]
        assert run.series("eval/loss").steps.tolist() == [0, 1, 2]


def test_readings_without_steps_are_counted(tmp_path):
    """`add_scalar(name, value)` without `global_step` writes step 0 each time."""
    with SummaryWriter(str(tmp_path / "tb")) as writer:
        for row in range(40):
            writer.add_scalar("loss", 4.0 - row / 20)
    with run_of(tmp_path / "tb", tmp_path) as run:
        assert run.series("train/loss").steps.tolist() == list(range(40))


def test_what_forewarn_wrote_to_a_tracker_is_read_under_its_own_names(tmp_path):
    rows = [f"{step},9,9,1.0,1.5,2.0,0.5\n" for step in range(40)]
    names = "step,train/loss,eval/loss,forewarn/train/loss,forewarn/eval/loss"
    names += ",forewarn/gradient/global_norm,forewarn/gradient/0.weight/norm"
    (tmp_path / "log.csv").write_text(f"{names}\n" + "".join(rows))
    with run_of(tmp_path / "log.csv", tmp_path) as run:
        assert run.series("train/loss").values[5] == 1.0
        assert run.series("eval/loss").values[5] == 1.5
        assert run.series("gradient/global_norm").values[5] == 2.0
        assert run.series("gradient/norm", "0.weight").values[5] == 0.5


def test_a_log_without_a_training_loss_is_not_called_healthy(tmp_path, forewarn):
    rows = "".join(f"{step},0.001,{3 - step / 50}\n" for step in range(100))
    (tmp_path / "log.csv").write_text("step,lr,val/box_loss\n" + rows)
    answer = checked(forewarn, tmp_path / "log.csv")
    assert answer["verdict"] == "no training loss to judge"
    (tmp_path / "log.csv").write_text("step,accuracy\n" + "".join(f"{step},{step}\n" for step in range(100)))
    said = forewarn("check", str(tmp_path / "log.csv"))
    assert (said.code, said.out) == (3, "")
    assert "--map NAME=train/loss" in " ".join(said.err.split())


def test_a_compressed_log_is_one_sentence(tmp_path, forewarn):
    (tmp_path / "log.csv.gz").write_bytes(gzip.compress(b"step,loss\n1,2\n"))
    said = forewarn("check", str(tmp_path / "log.csv.gz"))
    assert (said.code, "is compressed; unpack it first" in said.err) == (3, True)


def test_a_log_of_epochs_is_judged_by_epochs(tmp_path, forewarn):
    rows = [(epoch, 2.0 * 0.8**epoch, 2.0 * 0.9 ** min(epoch, 8) * 1.06 ** max(0, epoch - 8)) for epoch in range(30)]
    (tmp_path / "summary.csv").write_text(
        "epoch,train_loss,eval_loss\n" + "".join("{},{},{}\n".format(*row) for row in rows)
    )
    answer = checked(forewarn, tmp_path / "summary.csv")
    assert {"E101", "E104"} & codes(answer)
    assert len(answer["epochs"]) == 30
    assert any("epochs" in note for note in answer["notes"])


def test_steps_that_begin_again_with_each_epoch_are_added_up(tmp_path):
    rows = [f"{epoch},{step},1.5\n" for epoch in range(3) for step in range(10)]
    (tmp_path / "log.csv").write_text("epoch,step,loss\n" + "".join(rows))
    with run_of(tmp_path / "log.csv", tmp_path) as run:
        assert run.series("train/loss").steps.tolist() == list(range(30))


@pytest.mark.parametrize("every", [1, 10, 50])
@pytest.mark.parametrize("seed", range(2))
def test_a_healthy_run_raises_no_warning_however_rarely_it_was_logged(every, seed, tmp_path, forewarn):
    """A warm-up, a decay of the learning rate to zero, noisy gradients, and a validation loss that falls."""
    total, rng = 2000, np.random.default_rng(seed)
    every_loss = falling(range(total + 1), noise=0.15, seed=seed)
    rows = []
    for step in range(every, total + 1, every):
        lr = 1e-3 * min(1.0, step / 100) * (1 - step / total)
        mean = every_loss[step - every + 1 : step + 1].mean()
        row = {"step": step, "loss": mean, "learning_rate": lr, "grad_norm": float(np.exp(rng.normal(0, 0.3)))}
        rows.append(row | ({"eval_loss": float(every_loss[step] + 0.1)} if step % 500 == 0 else {}))
    (tmp_path / "log.jsonl").write_text("\n".join(map(json.dumps, rows)))
    answer = checked(forewarn, tmp_path / "log.jsonl")
    assert codes(answer) == set()
    assert answer["exit_code"] == 0


FAULTS = {
    "L101": lambda step: math.nan if step >= 1500 else 2.0,
    "L107": lambda step: 4.0 * math.exp(-step / 300) + 1.0 + (2.5 if step >= 1200 else 0.0),
    "L104": lambda step: 4.0 * math.exp(-step / 100) + 2.0,
    "L108": lambda step: 2.0 if step < 50 else min(60.0, 2.0 + step / 10),
}


@pytest.mark.parametrize("code", FAULTS)
def test_a_fault_shows_in_a_log_of_every_tenth_step(code, tmp_path, forewarn):
    rng = np.random.default_rng(0)
    rows = [f"{step},{FAULTS[code](step) * (1 + rng.normal(0, 0.01))},0.001" for step in range(0, 2500, 10)]
    (tmp_path / "log.csv").write_text("\n".join(["step,loss,lr", *rows]))
    assert code in codes(checked(forewarn, tmp_path / "log.csv"))


def test_what_was_not_judged_is_said_in_a_few_lines(tmp_path, forewarn):
    (tmp_path / "log.csv").write_text("step,loss\n" + "".join(f"{step * 10},{2 - step / 100}\n" for step in range(50)))
    said = forewarn("check", str(tmp_path / "log.csv"))
    assert "loss every 10 steps" in said.out
    section = said.out[said.out.index("Not judged") :].partition("\n\n")[0]
    assert len(section.splitlines()) <= 9
    assert "grad_norm" in section
    assert "loss-divergence (50 of 128)" in section


def test_a_name_that_is_not_recognized_is_said_and_can_be_given(tmp_path, forewarn):
    (tmp_path / "log.csv").write_text(
        "step,my_loss_term\n" + "".join(f"{step},{2 - step / 100}\n" for step in range(50))
    )
    said = forewarn("check", str(tmp_path / "log.csv"))
    assert said.code == 3
    assert "cannot be judged" in said.err
    assert "--map my_loss_term=train/loss" in " ".join(said.err.split())
    answer = checked(forewarn, tmp_path / "log.csv", "--map", "my_loss_term=train/loss")
    assert next(check for check in answer["checklist"] if check["name"] == "loss falling")["state"] == "pass"
    wrong = forewarn("check", str(tmp_path / "log.csv"), "--map", "my_los_term=train/loss")
    assert (wrong.code, "did you mean 'my_loss_term'" in wrong.err) == (3, True)
    wrong = forewarn("check", str(tmp_path / "log.csv"), "--map", "my_loss_term=train/los s")
    assert (wrong.code, "did you mean 'train/loss'" in wrong.err) == (3, True)
    assert forewarn("check", str(tmp_path / "log.csv"), "--map", "nothing").code == 64


def test_of_two_names_for_one_metric_the_other_is_kept_and_named(tmp_path):
    (tmp_path / "log.csv").write_text("step,loss,train_loss\n" + "".join(f"{step},1.0,2.0\n" for step in range(50)))
    imported = import_log(read_one(tmp_path / "log.csv"), tmp_path / "run")
    with open_run(tmp_path / "run") as run:
        assert run.series("train/loss").values[0] == 2.0
        assert run.series("logged/loss").values[0] == 1.0
    assert any("'loss' would fit too" in note for note in imported.notes)


def test_gradients_of_layers_become_scoped_readings(tmp_path):
    names = ["grad_2.0_norm/body.0.weight", "grad_2.0_norm/body.2.weight", "grad_2.0_norm_total"]
    (tmp_path / "metrics.csv").write_text(f"step,{','.join(names)}\n0,0.5,0.25,0.6\n")
    with run_of(tmp_path / "metrics.csv", tmp_path) as run:
        assert run.scopes("gradient/norm") == ("body.0.weight", "body.2.weight")
        assert run.series("gradient/norm", "body.2.weight").values.tolist() == [0.25]
        assert run.series("gradient/global_norm").values.tolist() == [np.float32(0.6)]


def test_several_logs_in_a_folder_are_judged_one_by_one_and_imported_one_by_one(tmp_path, forewarn):
    for name, loss in (("good", lambda step: 2 - step / 500), ("bad", lambda step: math.nan if step > 50 else 2.0)):
        (tmp_path / "logs" / name).mkdir(parents=True)
        (tmp_path / "logs" / name / "metrics.csv").write_text(
            "step,loss\n" + "".join(f"{step},{loss(step)}\n" for step in range(100))
        )
    said = forewarn("check", str(tmp_path / "logs"))
    assert said.code == 2
    assert said.out.index("bad") < said.out.index("good")
    assert len(json.loads(forewarn("check", str(tmp_path / "logs"), "--json").out)) == 2
    refused = forewarn("show", str(tmp_path / "logs"))
    assert (refused.code, "2 runs" in refused.err) == (3, True)
    assert forewarn("import", str(tmp_path / "logs"), "--out", str(tmp_path / "runs")).code == 0
    listed = forewarn("ls", str(tmp_path / "runs")).out
    assert "bad" in listed
    assert "good" in listed
    assert forewarn("check", str(tmp_path / "runs" / "bad_metrics")).code == 2


def test_logs_are_judged_on_a_machine_without_torch_and_without_the_tools(tmp_path):
    with SummaryWriter(tmp_path / "tb") as writer:
        for step, loss in enumerate(falling(range(100))):
            writer.add_scalar("train/loss", loss, step)
    (tmp_path / "log.csv").write_text("step,loss\n" + "".join(f"{step},{2 - step / 100}\n" for step in range(50)))
    script = f"""
import sys
for name in ("torch", "tensorboard", "wandb", "mlflow", "google.protobuf"):
    sys.modules[name] = None
from forewarn.cli import main
for arguments in ("check {tmp_path}/tb", "check {tmp_path}/log.csv", "check {LOGS}/torchtitan.log",
                  "import {tmp_path}/tb --out {tmp_path}/run", "check {tmp_path}/run", "report {tmp_path}/run --json"):
    try:
        main(arguments.split())
    except SystemExit as end:
        assert not end.code, (arguments, end.code)
"""
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)


def test_a_run_of_forewarn_is_not_imported(tmp_path, forewarn):
    (tmp_path / "log.csv").write_text("step,loss\n0,1.0\n1,0.9\n")
    assert forewarn("import", str(tmp_path / "log.csv"), "--out", str(tmp_path / "run")).code == 0
    again = forewarn("import", str(tmp_path / "run"))
    assert (again.code, "already" in again.err) == (3, True)
    twice = forewarn("import", str(tmp_path / "log.csv"), "--out", str(tmp_path / "run"))
    assert (twice.code, "already holds a run" in twice.err) == (3, True)


def test_a_path_without_a_log_is_one_sentence(tmp_path, forewarn):
    (tmp_path / "empty").mkdir()
    (tmp_path / "image.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0")
    (tmp_path / "empty.csv").write_text("")
    (tmp_path / "words.txt").write_text("nothing to see here\n")
    for name in ("missing", "empty", "image.png", "empty.csv", "words.txt"):
        said = forewarn("check", str(tmp_path / name))
        assert said.code == 3, name
        assert said.err.startswith("Error: ")
        assert said.err.count("\n") == 1
    with pytest.raises(LogError, match="neither a run"):
        find_logs(tmp_path / "empty")
