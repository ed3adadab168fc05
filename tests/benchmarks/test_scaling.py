import statistics

import pytest

from benchmarks.overhead import scaling as module
from benchmarks.overhead.scaling import Line, num_cases, scaling


@pytest.fixture
def small_sizes(monkeypatch):
    monkeypatch.setattr(module, "ELEMENTS", (1_000, 4_000))
    monkeypatch.setattr(module, "TENSORS", (2, 8, 20))
    monkeypatch.setattr(module, "FIXED_TENSORS", 4)
    monkeypatch.setattr(module, "FIXED_ELEMENTS", 1_000)
    monkeypatch.setattr(module, "REPEATS", 2)


def test_the_cost_is_measured_along_both_axes_with_a_line_through_it(small_sizes, tmp_path):
    told = []
    elements, tensors = scaling(tmp_path, told.append, large=False)
    assert (elements.axis, elements.sizes, elements.fixed) == ("elements", (1_000, 4_000), "4 tensors")
    assert (tensors.axis, tensors.sizes, tensors.fixed) == ("tensors", (2, 8, 20), "1,000 elements")
    assert len(told) == num_cases(large=False) == 5
    for axis in (elements, tensors):
        assert len(axis.measured_seconds) == len(axis.unmeasured_seconds) == len(axis.sizes)
        assert axis.line.r_squared <= 1
        assert axis.left_out == ()


def test_what_memory_does_not_allow_is_left_out_and_named(small_sizes, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "LARGE_ELEMENTS", (10**15,))
    elements, _ = scaling(tmp_path, lambda words: None, large=True)
    assert elements.sizes == (1_000, 4_000)
    assert elements.left_out == (10**15,)


def test_a_line_through_points_and_how_well_they_lie_on_it():
    exact = Line.through([1, 2, 5], [5.0, 7.0, 13.0])
    assert (exact.slope, exact.intercept, exact.r_squared) == pytest.approx((2.0, 3.0, 1.0))
    loose = Line.through([0, 1, 2, 3], [0.0, 2.0, 1.0, 3.0])
    correlation = statistics.correlation([0, 1, 2, 3], [0.0, 2.0, 1.0, 3.0])
    assert loose.r_squared == pytest.approx(correlation**2)
    assert Line.through([1, 2], [3.0, 3.0]).r_squared == 1.0
