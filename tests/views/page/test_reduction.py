"""Fewer points that look the same."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forewarn.views.page.reduction import in_order, kept_points


@given(
    values=st.lists(st.floats(width=32), min_size=1, max_size=400),
    columns=st.integers(1, 20),
    gaps=st.integers(1, 50),
)
def test_every_column_keeps_its_lowest_and_highest_value_and_what_is_not_finite(values, columns, gaps):
    values = np.array(values, np.float32)
    steps = np.cumsum(np.random.default_rng(gaps).integers(1, gaps + 1, len(values)))
    kept = kept_points(steps, values, columns)
    assert (np.diff(kept) > 0).all()
    assert {0, len(values) - 1} <= set(kept.tolist())
    width = steps[-1] - steps[0] + 1
    for column in range(columns):
        inside = [
            i for i, step in enumerate(steps.tolist()) if (step - int(steps[0])) * columns // int(width) == column
        ]
        shown = [i for i in inside if i in set(kept.tolist())]
        finite = [float(values[i]) for i in inside if np.isfinite(values[i])]
        if finite:
            seen = [float(values[i]) for i in shown if np.isfinite(values[i])]
            assert min(seen) == min(finite)
            assert max(seen) == max(finite)
        for kind in (np.isnan, np.isposinf, np.isneginf):
            assert any(kind(values[i]) for i in inside) == any(kind(values[i]) for i in shown)


def test_a_spike_of_one_step_stays_and_the_rest_shrinks():
    values = np.zeros(100_000, np.float32)
    values[54_321] = 7
    kept = kept_points(np.arange(100_000), values, 500)
    assert 54_321 in kept
    assert len(kept) <= 2 * 500 + 3


def test_nan_over_most_of_a_run_is_shown_by_a_few_points():
    values = np.full(100_000, np.nan, np.float32)
    values[:1000] = 1
    assert len(kept_points(np.arange(100_000), values, 500)) <= 4 * 500


def test_of_a_step_recorded_twice_the_last_reading_counts():
    steps, values = in_order(np.array([0, 1, 2, 1, 2, 3]), np.array([10, 11, 12, 21, 22, 23]))
    assert steps.tolist() == [0, 1, 2, 3]
    assert values.tolist() == [10, 21, 22, 23]


@pytest.mark.parametrize("size", [0, 1, 2])
def test_few_points_are_all_kept(size):
    assert kept_points(np.arange(size), np.zeros(size, np.float32), 1).tolist() == list(range(size))
