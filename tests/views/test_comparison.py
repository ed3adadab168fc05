"""Runs side by side, and where their losses part."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest

from forewarn.store import StoredSeries, open_run
from forewarn.views.comparison import compare, part, smoothed
from tests.page_runs import INFO, written
from tests.views.made import alert


def series(values: np.ndarray) -> StoredSeries:
    return StoredSeries(np.arange(len(values)), np.zeros(len(values)), values.astype(np.float32))


def noisy(seed: int, num_steps: int = 400, noise: float = 0.1) -> np.ndarray:
    steps = np.arange(num_steps)
    return 3 / (1 + steps / 50) + noise * np.random.default_rng(seed).standard_normal(num_steps)


@pytest.mark.parametrize("num_steps", [30, 100, 400, 3000])
def test_runs_that_differ_by_noise_alone_do_not_part(num_steps: int) -> None:
    parted = [part(series(noisy(2 * seed, num_steps)), series(noisy(2 * seed + 1, num_steps))) for seed in range(20)]
    assert sum(one is not None for one in parted) <= 1


@pytest.mark.parametrize("seed", range(5))
def test_runs_part_about_where_one_of_them_gets_worse(seed: int) -> None:
    left, right = noisy(seed), noisy(100 + seed)
    right[250:] += 0.5
    parting = part(series(left), series(right))
    assert parting is not None
    assert 235 <= parting.step <= 265
    assert parting.second - parting.first > parting.spread > 0
    assert parting.same_until is None


def test_one_outlier_is_no_parting() -> None:
    left = noisy(0)
    right = left.copy()
    right[200] = 50.0
    assert part(series(left), series(right)) is None


def test_losses_that_were_the_same_are_so_up_to_a_step_that_is_told() -> None:
    left = noisy(0)
    right = left.copy()
    right[120:] *= 2
    parting = part(series(left), series(right))
    assert parting is not None
    assert parting.same_until == 119
    assert 110 <= parting.step <= 130


def test_a_loss_that_is_not_a_number_parts_at_once() -> None:
    left = noisy(0)
    right = left.copy()
    right[300:] = math.nan
    parting = part(series(left), series(right))
    assert parting is not None
    assert (parting.step, parting.same_until) == (300, 299)
    assert math.isnan(parting.spread)


def test_runs_without_common_steps_do_not_part() -> None:
    empty = StoredSeries(np.empty(0, np.int64), np.empty(0), np.empty(0, np.float32))
    assert part(series(noisy(0)), empty) is None
    assert part(empty, empty) is None


def test_a_running_median_is_that_of_the_window_around_each_value() -> None:
    values = np.random.default_rng(0).random(40)
    expected = [np.median(values[max(0, index - 3) : index + 4]) for index in range(40)]
    assert smoothed(values, 7) == pytest.approx(expected)


def test_identical_runs_say_so(tmp_path: Path) -> None:
    written(tmp_path / "a")
    written(tmp_path / "b")
    with open_run(tmp_path / "a") as first, open_run(tmp_path / "b") as second:
        compared = compare([first, second], ["a", "b"])
    assert compared["identical"]
    assert (compared["part"], compared["config"], compared["layers"]) == (None, [], [])
    assert compared["words"] == ["The runs are identical: every loss of 100 steps is the same.", "No run has alerts."]


def test_a_run_that_ended_early_is_the_same_up_to_its_end(
    tmp_path: Path,
) -> None:
    losses = [5 / (1 + step / 20) for step in range(100)]
    written(tmp_path / "a", losses)
    written(tmp_path / "early", losses[:60])
    written(tmp_path / "none", [])
    with open_run(tmp_path / "a") as run, open_run(tmp_path / "early") as early, open_run(tmp_path / "none") as none:
        assert "Every loss is the same up to step 59, the last that both have." in compare([run, early], "ab")["words"]
        assert "The runs have no loss at the same step." in compare([run, none], "ab")["words"]


def test_differences_of_settings_layers_and_alerts_stand_side_by_side(tmp_path: Path) -> None:
    falling = [5 / (1 + step / 20) for step in range(100)]
    other = dataclasses.replace(
        INFO, groups=({"lr": 0.1},), hyperparameters={"total_steps": 200, "dropout": 0.1}, versions={"forewarn": "0.2"}
    )
    written(tmp_path / "a", falling, (alert("L102"),))
    written(tmp_path / "b", [loss + 3 for loss in falling], info=other)
    with open_run(tmp_path / "a") as first, open_run(tmp_path / "b") as second:
        compared = compare([first, second], ["a", "b"])
    assert {row["key"]: row["values"] for row in compared["config"]} == {"lr": [1e-3, 0.1], "dropout": [None, 0.1]}
    assert compared["environment"] == [{"key": "forewarn", "values": ["0.1.0", "0.2"]}]
    assert compared["part"]["step"] == 0
    assert [(row["code"], row["fired"]) for row in compared["alerts"]] == [("L102", [6, None])]
    assert compared["losses"][0]["first"] == 5.0
    assert compared["losses"][0]["last"] == pytest.approx(np.median(falling[-10:]))
    assert "They differ in 2 settings: lr 0.001 | 0.1; dropout unset | 0.1." in compared["words"]
    assert "Only a has loss-spike (step 6)." in compared["words"]
