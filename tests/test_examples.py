"""The examples for loops in which `forewarn.watch` itself is enough run, and record what they train."""

import runpy
import sys
from pathlib import Path

import forewarn

EXAMPLES = Path(__file__).parent.parent / "examples"


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
