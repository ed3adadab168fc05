"""Histograms with fixed bins: they add up, and they move with a scale."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forewarn.histograms import in_line, line_edges, merged, over_scopes, shifted, used_bins
from forewarn.types import Distribution
from tests.measure.engine.distributions.made import histogram

VALUES = st.lists(st.floats(-1e6, 1e6, allow_subnormal=False, width=32), max_size=40)


def distribution(step: int, *tensors: list[float], name: str = "gradient/histogram") -> Distribution:
    counts, zeros = zip(*map(histogram, tensors), strict=True)
    scopes = tuple(f"t{at}" for at in range(len(tensors)))
    return Distribution(step, float(step), name, scopes, np.concatenate(counts), np.concatenate(zeros))


@given(st.lists(st.tuples(VALUES, VALUES), min_size=1, max_size=4))
def test_parts_add_up_to_the_histogram_of_the_whole(parts):
    found = merged([distribution(step, *tensors) for step, tensors in enumerate(parts)])
    whole = distribution(0, *([value for part in column for value in part] for column in zip(*parts, strict=True)))
    assert np.array_equal(found.counts, whole.counts)
    assert np.array_equal(found.zeros, whole.zeros)
    assert (found.step, found.time) == (len(parts) - 1, len(parts) - 1.0)


@given(VALUES, VALUES)
def test_all_tensors_together_are_the_histogram_of_all_values(first, second):
    found = over_scopes(distribution(3, first, second))
    counts, zeros = histogram(first + second)
    assert found.scopes == ("",)
    assert np.array_equal(found.counts, counts)
    assert np.array_equal(found.zeros, zeros)


def test_histograms_of_different_tensors_do_not_add_up():
    with pytest.raises(ValueError, match="do not belong to the same tensors; merge only histograms of one metric"):
        merged([distribution(0, [1.0]), distribution(0, [1.0], name="weight/histogram")])
    with pytest.raises(ValueError, match="for 2 scopes"):
        merged([distribution(0, [1.0], [2.0]), distribution(0, [1.0])])


@given(VALUES, st.integers(-70, 70))
def test_a_power_of_two_moves_every_bin_by_whole_places(values, power):
    counts, _ = histogram(values)
    expected, _ = histogram(np.ldexp(values, power))
    known = power == 0 or not counts[0, :, 0 if power > 0 else -1].any()
    assert np.array_equal(shifted(counts, power), expected if known else np.zeros_like(counts))


@pytest.mark.parametrize(("beyond", "power"), [(2.0**60, -16), (2.0**-60, 3)])
def test_what_had_no_outer_end_is_unknown_once_it_comes_back_into_the_range(beyond, power):
    counts = np.concatenate([histogram([1.0, beyond])[0], histogram([1.0])[0]])
    assert shifted(counts, power)[0].sum() == 0
    assert shifted(counts, power)[1, 1, 40 + power] == 1
    assert shifted(counts, -power)[0].sum() == 2


def test_counts_in_line_lie_between_their_edges():
    values = [-5.0, -0.3, 0.0, 0.0, 0.26, 4.0, 7.9]
    counts, zeros = histogram(values)
    bins = used_bins(counts)
    line, edges = in_line(counts[:, :, bins], zeros)[0], line_edges(bins)
    assert len(edges) == len(line) + 1
    assert (np.diff(edges) > 0).all()
    assert line.tolist() == np.histogram(values, edges)[0].tolist()


def test_the_range_of_nothing_is_empty():
    assert used_bins(np.zeros((3, 2, 64), np.int64)) == slice(0, 0)
