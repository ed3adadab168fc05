"""`forewarn show`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from forewarn.cli import USAGE_ERROR
from forewarn.config import Config
from forewarn.measure.options import Measure
from forewarn.store import RunWriter
from forewarn.types import Distribution
from tests.cli.conftest import FACTS, LAYERS, Said, block, blocks_of, falling
from tests.measure.engine.distributions.made import histogram

Call = Callable[..., Said]


def row_of(said: Said, layer: str) -> list[str]:
    """The cells of a layer, as words."""
    (line,) = (line for line in said.out.splitlines() if line.startswith(layer))
    return line.split()


def test_the_last_measured_step_is_shown_by_default(forewarn: Call, healthy: Path) -> None:
    said = forewarn("show", healthy)
    assert said.code == 0
    assert "step 290 of 299" in said.out
    assert row_of(said, "blocks.1.weight")[1:] == ["0.25", "4", "0.002", "0.25"]
    assert "gradient  global_norm 1.03" in said.out
    assert "activation/std" not in said.out


def test_step_means_the_measured_step_at_or_after(forewarn: Call, healthy: Path) -> None:
    said = forewarn("show", healthy, "--step", 115)
    assert "step 120 of 299 (the next measured step after 115)\n" in said.out
    assert row_of(said, "[red]evil")[2] == "5.12"
    assert "step 120 of 299\n" in forewarn("show", healthy, "--step", 120).out
    beyond = forewarn("show", healthy, "--step", 295)
    assert "step 290 of 299 (the last measured step; none at or after step 295)\n" in beyond.out


def test_names_are_shown_literally(forewarn: Call, healthy: Path) -> None:
    said = forewarn("show", healthy)
    assert "[red]evil[/red]\\x1b[31m" in said.out
    assert "\x1b" not in said.out


def test_scope_and_metric_choose(forewarn: Call, healthy: Path) -> None:
    said = forewarn("show", healthy, "--scope", r"\.1\.", "--metric", "norm$")
    assert row_of(said, "layer") == ["layer", "gradient", "norm", "weight", "norm"]
    assert row_of(said, "blocks.1.weight")[1:] == ["0.25", "4"]
    assert "blocks.0.weight" not in said.out
    assert "train/loss" not in said.out
    assert "activation/std" in forewarn("show", healthy, "--metric", "activation").out


def test_a_metric_of_the_whole_run_needs_no_layers(forewarn: Call, healthy: Path) -> None:
    said = forewarn("show", healthy, "--metric", "^train/loss$", "--step", 5)
    assert "step 5 of 299" in said.out
    assert "train  loss 4." in said.out
    assert "layer" not in said.out


def test_a_frozen_layer_says_why_and_a_broken_number_is_shown_as_it_is(forewarn: Call, tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "run", info=FACTS, config=Config().to_dict())
    blocks = [
        block(0, "gradient/norm", 1.0, float("nan"), 1.0, scopes=LAYERS),
        block(0, "gradient/nonfinite", 0.0, 7.0, 0.0, scopes=LAYERS),
        block(0, "update/frozen_cause", 0.0, 2.0, 99.0, scopes=LAYERS),
    ]
    writer.append(0, blocks)
    writer.close()
    said = forewarn("show", tmp_path / "run")
    assert row_of(said, "blocks.0.weight")[1:] == ["1", "0", "yes"]
    assert row_of(said, "blocks.1.weight")[1:] == ["NaN", "7", "no:", "in", "no", "optimizer", "group"]
    assert row_of(said, "[red]")[1:] == ["1", "0", "99"]


@pytest.fixture
def spread(tmp_path: Path) -> Path:
    """A run with a bell and a shifted bell, recorded at steps 0 and 5."""
    random = np.random.default_rng(0)
    writer = RunWriter(tmp_path / "run", info=FACTS, config=Config().to_dict())
    for step in (0, 5):
        tensors = [random.normal(0, 0.1, 5000), random.normal(4, 1, 5000)]
        counts, zeros = (np.concatenate(part) for part in zip(*map(histogram, tensors), strict=True))
        blocks = [
            block(step, "weight/shape", 0.0, 1.0, scopes=LAYERS[:2]),
            block(step, "weight/min", -0.4, 0.5, scopes=LAYERS[:2]),
            block(step, "weight/p50", 0.001 * (step + 1), 4.0, scopes=LAYERS[:2]),
        ]
        writer.append(step, blocks, [Distribution(step, 0.0, "weight/histogram", LAYERS[:2], counts, zeros)])
    writer.append(9, [block(9, "train/loss", 1.0)])
    writer.close()
    return tmp_path / "run"


def test_a_histogram_is_a_picture_with_its_shape_in_words(forewarn: Call, spread: Path) -> None:
    said = forewarn("show", spread, "--histogram", "blocks.0.weight")
    assert said.code == 0
    assert "weight of blocks.0.weight  step 5" in said.out
    assert "█" in said.out
    assert "5,000 values, 0 of them zero" in said.out
    assert "healthy: one peak around zero" in said.out
    assert "min -0.4  p50 0.006" in said.out
    earlier = forewarn("show", spread, "--histogram", "blocks.1.weight", "--step", 0).out
    assert "step 0\n" in earlier
    assert "shifted: " in earlier


def test_a_histogram_takes_no_other_choice(forewarn: Call, spread: Path) -> None:
    for option in ("--metric", "--scope"):
        said = forewarn("show", spread, "--histogram", "blocks.0.weight", option, "weight")
        assert said.code == USAGE_ERROR
        assert "remove --metric and --scope" in said.err


@pytest.mark.parametrize(
    ("config", "metric", "why"),
    [
        (Config(measure=Measure(histograms="off")), "gradient/norm", 'it was recorded with Measure(histograms="off")'),
        (Config(), "train/loss", "no tensors were measured; use forewarn.watch(every=N), or forewarn train lm"),
        (Config(), "gradient/norm", "no histograms were recorded"),
    ],
)
def test_a_run_without_histograms_says_why(
    forewarn: Call, tmp_path: Path, config: Config, metric: str, why: str
) -> None:
    writer = RunWriter(tmp_path / "run", info=FACTS, config=config.to_dict())
    writer.append(0, [block(0, metric, 1.0)])
    writer.close()
    said = forewarn("show", tmp_path / "run", "--histogram", "blocks.0.weight")
    assert said.code == 3
    assert "has no histograms: " in said.err
    assert why in said.err


def test_a_metric_that_comes_scope_by_scope_is_one_column(forewarn: Call, tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "run", info=FACTS, config={})
    writer.append(
        3, [block(3, "eval/task_loss", 0.5, scopes=("one",)), block(3, "eval/task_loss", 0.25, scopes=("two",))]
    )
    writer.close()
    said = forewarn("show", tmp_path / "run", "--metric", "eval")
    assert said.out.count("eval/task_loss") == 1
    assert (row_of(said, "one"), row_of(said, "two")) == (["one", "0.5"], ["two", "0.25"])


def test_columns_that_do_not_fit_go_into_further_tables(
    forewarn: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forewarn.cli.terminal.PLAIN_WIDTH", 0)
    monkeypatch.setenv("COLUMNS", "80")
    writer = RunWriter(tmp_path / "run", info=FACTS, config={})
    layers = ("blocks.0.attention.output.weight", "blocks.0.attention.output.bias")
    quantities = ("norm", "mean", "std", "min", "max", "zero_fraction")
    writer.append(0, [block(0, f"gradient/{name}", 1.2345e-7, 0.033456, scopes=layers) for name in quantities])
    writer.close()
    lines = forewarn("show", tmp_path / "run", "--metric", "gradient/").out.splitlines()
    rows = [line.split() for line in lines if line.startswith(layers)]
    assert max(map(len, lines)) <= 80
    assert len(rows) > len(layers), "the layers stand at the left of each table"
    for layer, value in zip(layers, ("1.23e-7", "0.0335"), strict=True):
        assert [cell for row in rows if row[0] == layer for cell in row[1:]] == [value] * len(quantities)
    assert sum(line.count("gradient") for line in lines) == 1, "what all columns share is said once"


def test_shapes_are_words_in_the_table(forewarn: Call, spread: Path) -> None:
    said = forewarn("show", spread, "--metric", "/shape")
    assert row_of(said, "blocks.0.weight")[1:] == ["healthy"]
    assert row_of(said, "blocks.1.weight")[1:] == ["shifted"]


def test_a_histogram_that_is_not_there_is_one_sentence(forewarn: Call, spread: Path) -> None:
    said = forewarn("show", spread, "--histogram", "blocks.7.weight")
    assert said.code == 3
    assert "there is no scope of weight/histogram 'blocks.7.weight'; did you mean" in said.err
    assert said.err.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--scope", "("], "--scope '(' is not a valid regular expression"),
        (["--metric", "*"], "--metric '*' is not a valid regular expression"),
        (["--metric", "nothing-like-it"], "no name matches --metric 'nothing-like-it'; the run has 10, such as '"),
        (["--metric", "weigth/norm"], "no name matches --metric 'weigth/norm'; did you mean 'weight/norm'"),
        (["--scope", "conv"], "no name matches --scope 'conv'; the run has 3, such as 'blocks.0.weight' or"),
        (["--scope", "block.0.weight"], "no name matches --scope 'block.0.weight'; did you mean 'blocks.0.weight'"),
    ],
)
def test_what_cannot_be_shown_is_one_sentence(forewarn: Call, healthy: Path, options: list[str], words: str) -> None:
    said = forewarn("show", healthy, *options)
    assert said.code == 3
    assert words in said.err
    assert said.err.count("\n") == 1


def test_an_empty_run_is_one_sentence(forewarn: Call, tmp_path: Path) -> None:
    RunWriter(tmp_path / "run", info=FACTS, config={}).close()
    said = forewarn("show", tmp_path / "run")
    assert said.code == 3
    assert "has no recorded metrics yet" in said.err


def declared_run(path: Path, total_steps: int) -> Path:
    info = dataclasses.replace(FACTS, hyperparameters={"total_steps": total_steps})
    writer = RunWriter(path, info=info, config=Config().to_dict())
    for step, loss in enumerate(falling(100)):
        writer.append(step, blocks_of(step, loss))
    writer.close()
    return path


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (0, "median 0.001; typical early in a run 1e-3 to 1e-2"),
        (50, "median 0.001; typical in the middle of a run 1e-4 to 1e-3"),
        (99, "median 0.001; typical late in a run 1e-5 to 1e-4"),
    ],
)
def test_the_update_ratio_stands_beside_its_healthy_band(forewarn: Call, tmp_path: Path, step: int, words: str) -> None:
    run = declared_run(tmp_path / "run", 100)
    assert f"update ratio: {words}\n" in forewarn("show", run, "--step", step).out
    assert f"update ratio: {words}\n" in forewarn("show", run, "--step", step, "--metric", "update/").out
    assert "healthy" not in forewarn("show", run, "--step", step, "--metric", "gradient/").out


def test_where_nothing_tells_the_phase_of_a_run_every_band_is_shown(forewarn: Call, healthy: Path) -> None:
    said = " ".join(forewarn("show", healthy).out.split())
    assert "typical early in a run 1e-3 to 1e-2, in the middle of a run 1e-4 to 1e-3, late in a run 1e-5" in said


@pytest.mark.parametrize("bad", [0.0, 3.0])
def test_a_column_that_says_all_is_well_of_every_layer_becomes_a_sentence(
    forewarn: Call, tmp_path: Path, bad: float
) -> None:
    writer = RunWriter(tmp_path / "run", info=FACTS, config=Config().to_dict())
    norms = block(0, "gradient/norm", 1.0, 1.0, 1.0, scopes=LAYERS)
    writer.append(0, [norms, block(0, "gradient/nonfinite", 0.0, bad, 0.0, scopes=LAYERS)])
    writer.close()
    said = forewarn("show", tmp_path / "run")
    assert ("No gradient value is NaN or infinite." in said.out) is (bad == 0)
    assert row_of(said, "blocks.1.weight")[1:] == (["1"] if bad == 0 else ["1", "3"])
    part = forewarn("show", tmp_path / "run", "--scope", "blocks.0")
    assert "No gradient value" not in part.out, "it would speak of layers that are not shown"
    asked = forewarn("show", tmp_path / "run", "--metric", "gradient/nonfinite")
    assert row_of(asked, "blocks.1.weight")[1:] == ["0" if bad == 0 else "3"]
