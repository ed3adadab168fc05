"""Depth × time, one step over depth, and histograms over time, against plain loops."""

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from forewarn.config import Config
from forewarn.store import Run, RunWriter, open_run
from forewarn.types import Block, ParameterInfo, RunInfo
from forewarn.views.page.maps import evenly, heat_map, histogram_map, profile
from tests.page_runs import LAYERS, unpacked, written

SCOPES = ("b", "a", "late")
STEPS = 90


def table() -> np.ndarray:
    """Readings of three scopes; the last one begins late, and some are missing or infinite."""
    values = np.random.default_rng(3).lognormal(size=(3, STEPS)).astype(np.float32)
    values[2, :40] = np.nan
    values[0, 7] = 1e6
    values[1, 33], values[1, 34] = np.inf, -np.inf
    return values


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    parameters = {scope: ParameterInfo((2,), "Linear.bias", "float32", 0, True) for scope in ("a", "b", "late")}
    writer = RunWriter(tmp_path / "run", info=RunInfo(parameters=parameters), config=Config().to_dict())
    values = table()
    for step in range(STEPS):
        scopes, column = (SCOPES[:2], values[:2, step]) if step < 40 else (SCOPES, values[:, step])
        writer.append(3 * step, [Block(3 * step, 0.0, "gradient/norm", scopes, column)])
        if step == 60:
            writer.flush()  # some rows in chunks, some in the tail
    writer.flush()
    with open_run(tmp_path / "run") as stored:
        yield stored
    writer.close()


def test_a_map_has_a_column_per_measured_step_if_there_is_room_and_rows_in_the_order_of_the_model(run):
    header, arrays = unpacked(heat_map(run, "gradient/norm", None, None, 400))
    assert header["scopes"] == ["a", "b", "late"]
    assert header["starts"] == [3 * step for step in range(STEPS)]
    assert header["ends"][:2] == [2, 5]
    assert header["ends"][-1] == 3 * (STEPS - 1)
    expected = table()[[1, 0, 2]]
    assert np.array_equal(arrays["cells"].reshape(3, STEPS), expected, equal_nan=True)


def test_a_cell_is_the_value_furthest_from_the_median_of_its_row(run):
    columns = 9
    header, arrays = unpacked(heat_map(run, "gradient/norm", None, None, columns))
    cells = arrays["cells"].reshape(3, columns)
    values = table()[[1, 0, 2]]
    for row in range(3):
        finite = values[row][np.isfinite(values[row])]
        for column in range(columns):
            inside = [
                float(value) for step, value in enumerate(values[row])
                if header["starts"][column] <= 3 * step <= header["ends"][column] and not math.isnan(value)
            ]  # fmt: skip
            if not inside:
                assert np.isnan(cells[row, column])
            elif any(math.isinf(value) for value in inside):
                assert np.isinf(cells[row, column])
            else:
                middle = math.log(np.median(finite))
                furthest = max(inside, key=lambda value: abs(math.log(value) - middle))
                assert cells[row, column] == np.float32(furthest)


def test_a_part_of_the_steps_and_of_the_rows_can_be_asked_for(run):
    header, arrays = unpacked(heat_map(run, "gradient/norm", 30, 60, 400, rows=2))
    assert header["scopes"] == ["a", "late"]
    assert header["starts"] == list(range(30, 61, 3))
    assert np.array_equal(arrays["cells"].reshape(2, -1), table()[1:, 10:21], equal_nan=True)


def test_a_profile_has_the_newest_readings_and_what_is_usual_before_them(run):
    header, arrays = unpacked(profile(run, "gradient/norm", 130))
    assert header["step"] == 129
    values = table()[[1, 0, 2]]
    assert arrays["values"].tolist() == values[:, 43].tolist()
    assert math.isnan(arrays["low"][2]), "three earlier readings are too few"
    before = values[1, :43].astype(np.float64)
    low, high = np.percentile(before, [5, 95])
    assert arrays["low"][1] == pytest.approx(low)
    assert arrays["high"][1] == pytest.approx(high)


def test_the_shares_of_a_histogram_add_up_and_columns_are_merged(tmp_path):
    with open_run(written(tmp_path / "run")) as run:
        header, arrays = unpacked(histogram_map(run, "gradient/histogram", LAYERS[0], None, None, 3))
    steps = list(range(10, 100, 10))
    assert header["exponents"] == [0]
    shares, zeros = arrays["shares"], arrays["zeros"]
    assert shares + zeros == pytest.approx(np.ones(3))
    first = [step for step in steps if header["steps"][0] <= step < header["steps"][1]]
    assert zeros[0] == pytest.approx(4 * len(first) / sum(step + 8 for step in first))


def test_items_are_chosen_evenly_with_both_ends():
    assert evenly(list("abcdefghij"), 4) == ["a", "d", "g", "j"]
    assert evenly(["a"], 1) == ["a"]
