"""Every example runs and does what it says."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import forewarn

EXAMPLES = Path(__file__).parent.parent / "examples"


def ran(name: str, *arguments: object, **settings: object) -> None:
    runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"](*arguments, **settings)


def names_of(run: Path) -> set[str]:
    with forewarn.open_run(run) as stored:
        return {alert.name for alert in stored.alerts() if alert.severity > forewarn.Severity.INFO}


def test_a_plain_loop_is_healthy_and_too_large_steps_are_named(tmp_path, capsys):
    ran("raw_loop", tmp_path / "healthy")
    assert "healthy · 300 steps" in capsys.readouterr().err
    ran("raw_loop", tmp_path / "broken", lr=3.0, steps=60)
    assert names_of(tmp_path / "healthy") == set()
    assert "update-ratio-high" in names_of(tmp_path / "broken")


def test_a_gan_is_healthy_though_the_sum_of_its_losses_does_not_fall(tmp_path, capsys):
    ran("gan", tmp_path / "run")
    assert "healthy · 300 steps" in capsys.readouterr().err
    with forewarn.open_run(tmp_path / "run") as run:
        losses = run.series("train/loss").values
        assert losses[-50:].mean() > 0.9 * losses[:50].mean()
        assert run.scopes("gradient/optimizer_norm") == ("D", "G")


def test_a_policy_reaches_the_end_of_the_corridor(tmp_path, capsys):
    ran("reinforcement", tmp_path / "run")
    assert float(re.search(r"mean return ([\d.]+)", capsys.readouterr().out)[1]) > 0.75
    with forewarn.open_run(tmp_path / "run") as run:
        returns = run.series("game/return").values
        assert returns[-1] > returns[0] + 0.2
    assert names_of(tmp_path / "run") == set()


def test_an_own_rule_fires(tmp_path):
    ran("own_rule", tmp_path / "run")
    assert names_of(tmp_path / "run") == {"low-accuracy"}


def test_an_own_probe_records_its_metric_on_measured_steps(tmp_path):
    ran("own_probe", tmp_path / "run")
    with forewarn.open_run(tmp_path / "run") as run:
        ranks = run.series("matrix/effective_rank", "2.weight")
        assert {20, 40, 180} <= set(ranks.steps.tolist())
        assert 16 > ranks.values[0] > ranks.values[-1] > 1


def test_the_tensorboard_logs_of_an_ordinary_loop_name_its_fault(tmp_path, capfd):
    assert runpy.run_path(str(EXAMPLES / "tensorboard_logs.py"))["main"](tmp_path / "logs") == 1
    text = " ".join(capfd.readouterr().out.split())
    assert "when the learning rate went from 0.002 to 0.06" in text
    assert "1. Set the learning rate back to 0.002." in text


@pytest.mark.ci
@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_several_processes_are_one_run(how, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", EXAMPLES / "torchrun.py"]
    subprocess.run([*command, "--parallel", how, "--folder", tmp_path / "run"], check=True, timeout=300)
    with forewarn.open_run(tmp_path / "run") as run:
        assert run.num_steps == 100
        assert run.alerts() == []
        assert len(run.scopes("rank/step_seconds")) == 2


def test_a_recipe_in_the_style_of_torchtune_resumes_its_run(tmp_path):
    main = runpy.run_path(str(EXAMPLES / "torchtune_recipe.py"))["main"]
    main(["--folder", str(tmp_path / "whole"), "--epochs", "3"])
    main(["--folder", str(tmp_path / "parts"), "--epochs", "2"])
    main(["--folder", str(tmp_path / "parts"), "--epochs", "3", "--resume"])
    losses = []
    for name in ("whole", "parts"):
        with forewarn.open_run(tmp_path / name / "forewarn") as run:
            losses.append(run.series("train/loss").values.tolist())
            assert run.series("train/loss").steps.tolist() == list(range(30))
            assert run.alerts() == []
    assert losses[0] == losses[1]
    assert losses[0][-1] < losses[0][0] - 1


def test_the_training_function_for_ray_runs_in_a_plain_call(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    runpy.run_path(str(EXAMPLES / "ray_train.py"))["main"](tmp_path)
    assert capsys.readouterr().out.startswith("ray is not installed")
    with forewarn.open_run(tmp_path / "forewarn") as run:
        assert run.num_steps == 60
        assert run.series("eval/loss").steps.tolist() == [19, 39, 59]
        assert run.alerts() == []
