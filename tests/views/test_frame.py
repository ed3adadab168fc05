"""A run as a DataFrame: the readings bit for bit, in the shape that was asked for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from forewarn.store import Run, RunWriter, open_run
from forewarn.store.errors import UnknownSeriesError
from forewarn.types import Block, RunInfo

LAYERS = ("a.weight", "b.weight", "[x]\x1b")
STEPS = 25


def block(step: int, name: str, *values: float, scopes: tuple[str, ...] = ("",)) -> Block:
    return Block(step, 1.7e9 + step, name, scopes, np.array(values, np.float32))


@pytest.fixture
def run(tmp_path: Path) -> Run:
    writer = RunWriter(tmp_path / "run", info=RunInfo(model="Net"), config={})
    for step in range(STEPS):
        blocks = [block(step, "train/loss", 1 / (step + 1)), block(step, "train/loss_ema", 0.5)]
        blocks.append(block(step, "train/lr", 1e-3, 1e-4, scopes=("0", "1")))
        if step % 10 == 0:
            blocks.append(block(step, "gradient/norm", step, np.nan, np.inf, scopes=LAYERS))
        writer.append(step, blocks)
    writer.append(20, [block(20, "my/score", 1.0)])
    writer.append(20, [block(20, "my/score", 2.0)])
    writer.close()
    with open_run(tmp_path / "run") as stored:
        yield stored


def test_a_wide_frame_has_a_row_per_step_and_a_column_per_series(run: Run) -> None:
    table = run.to_pandas()
    loss = run.series("train/loss")
    assert table.index.name == "step"
    assert table.index.tolist() == list(range(STEPS))
    assert table.columns.names == ["metric", "scope"]
    assert isinstance(table["train/loss"], pd.Series)
    assert table["train/loss"].to_numpy().tobytes() == loss.values.tobytes()
    assert list(table["train/lr"].columns) == ["0", "1"]
    assert (table["train/lr"]["1"] == np.float32(1e-4)).all()


def test_without_a_filter_single_tensors_are_left_out_and_with_a_dot_nothing_is(run: Run) -> None:
    assert set(run.to_pandas().columns.get_level_values("metric")) == {
        "train/loss", "train/loss_ema", "train/lr", "my/score",
    }  # fmt: skip
    assert set(run.to_pandas(".").columns.get_level_values("metric")) == set(run.names())


def test_a_metric_by_name_is_that_one_alone_and_has_its_own_steps(run: Run) -> None:
    assert list(run.to_pandas("train/loss").columns) == [("train/loss", "")]
    norms = run.to_pandas("gradient/norm")["gradient/norm"]
    assert norms.index.tolist() == [0, 10, 20]
    assert list(norms.columns) == list(LAYERS)
    assert norms["a.weight"].tolist() == [0, 10, 20]
    assert norms["b.weight"].isna().all()
    assert np.isposinf(norms["[x]\x1b"]).all()


def test_regular_expressions_lists_and_scopes_choose(run: Run) -> None:
    def chosen(*arguments: object) -> list[tuple[str, str]]:
        return list(run.to_pandas(*arguments).columns)

    assert chosen("loss") == [("train/loss", ""), ("train/loss_ema", "")]
    assert chosen("^my/") == [("my/score", "")]
    assert chosen(["my/score", "_ema$"]) == [("train/loss_ema", ""), ("my/score", "")]
    assert chosen("gradient", r"\.weight$") == [("gradient/norm", "a.weight"), ("gradient/norm", "b.weight")]
    assert chosen(None, "a.weight") == [("gradient/norm", "a.weight")]
    assert chosen(None, "[x]\x1b") == [("gradient/norm", "[x]\x1b")]
    assert chosen("train/", "") == [("train/loss", ""), ("train/loss_ema", "")]


def test_of_a_step_that_was_recorded_twice_the_last_reading_counts_and_a_long_frame_has_both(run: Run) -> None:
    assert run.to_pandas("my/score")["my/score"].to_dict() == {20: 2.0}
    assert run.to_pandas("my/score", long=True)["value"].tolist() == [1.0, 2.0]


def test_a_long_frame_has_a_row_per_reading(run: Run) -> None:
    table = run.to_pandas(["train/loss", "gradient/norm"], long=True)
    assert list(table.columns) == ["step", "time", "metric", "scope", "value"]
    assert len(table) == STEPS + 3 * len(LAYERS)
    assert table["step"].is_monotonic_increasing
    assert table["time"].iloc[0] == pd.Timestamp(1.7e9, unit="s", tz="UTC")
    losses = table[table["metric"] == "train/loss"]
    assert losses["value"].to_numpy().tobytes() == run.series("train/loss").values.tobytes()


def test_what_matches_nothing_is_refused_with_a_suggestion(run: Run) -> None:
    with pytest.raises(UnknownSeriesError, match="no metric matches 'losses'; did you mean 'train/loss'"):
        run.to_pandas("losses")
    with pytest.raises(UnknownSeriesError, match=r"no scope matches 'a\.wieght'; did you mean 'a\.weight'"):
        run.to_pandas("gradient/norm", "a.wieght")
    with pytest.raises(ValueError, match=r"'\(' is neither a metric nor a valid regular expression"):
        run.to_pandas("(")


def test_a_run_without_readings_is_an_empty_frame(tmp_path: Path) -> None:
    RunWriter(tmp_path / "run", info=RunInfo(), config={}).close()
    with open_run(tmp_path / "run") as run:
        assert run.to_pandas().shape == (0, 0)
        assert run.to_pandas(long=True).shape == (0, 5)


@pytest.mark.parametrize(
    ("package", "call", "extra"), [("pandas", "to_pandas()", "pandas"), ("matplotlib", "plot()", "plot")]
)
def test_a_missing_package_is_one_sentence_with_the_command(run: Run, package: str, call: str, extra: str) -> None:
    script = f"""
import sys
sys.modules[{package!r}] = None
import forewarn
run = forewarn.open_run({str(run.path)!r})
try:
    run.{call}
except ModuleNotFoundError as error:
    print(error)
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    method = call.removesuffix("()")
    assert ended.stdout == f"Run.{method} needs {package}: pip install 'forewarn[{extra}]'\n"
