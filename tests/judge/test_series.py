"""Series, panels and baselines, against plain numpy."""

import math

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis.extra.numpy import arrays

from forewarn.judge.series import MAD_TO_STD, Baseline, Panel, Series, aligned, median, nanmedian, trailing
from forewarn.judge.spike import Spike

some_values = st.one_of(
    st.floats(-10, 10, width=32), st.sampled_from([0.0, float("nan"), float("inf"), float("-inf"), 1e-30, 1e30])
)
tables = st.tuples(st.integers(0, 12), st.integers(0, 4)).flatmap(
    lambda shape: arrays(np.float32, shape, elements=some_values)
)


@given(tables)
def test_the_median_skips_what_is_not_finite(rows):
    for at, got in enumerate(nanmedian(rows)):
        finite = rows[:, at][np.isfinite(rows[:, at])].astype(np.float64)
        assert got == np.median(finite) if len(finite) else math.isnan(got)


@given(tables)
def test_the_median_of_one_series_is_that_of_its_column(rows):
    for at, expected in enumerate(nanmedian(rows)):
        assert np.array_equal(median(rows[:, at]), expected, equal_nan=True)


@given(tables, st.integers(1, 12), st.integers(0, 3))
def test_panel_and_series_agree(rows, window, skip):
    scopes = tuple("abcd"[: rows.shape[1]])
    panel = Panel(scopes, np.arange(len(rows)), rows)
    for at, scope in enumerate(scopes):
        series = Series(panel, scope)
        assert np.array_equal(panel.median(window, skip)[at], series.median(window, skip), equal_nan=True)
        assert np.array_equal(panel.last[at], series.last, equal_nan=True)
        assert panel.count()[at] == len(series.finite())
        assert panel.at == series.at == len(rows) - 1


def test_a_scope_that_was_never_read_is_an_empty_series():
    series = Series(Panel(("a",), np.arange(3), np.ones((3, 1), np.float32)), "b")
    assert len(series) == 0
    assert series.at == -1
    assert math.isnan(series.last)
    assert not series.deviation(Spike()).outlier


@given(st.lists(st.floats(-1e3, 1e3, width=32), min_size=3, max_size=40))
def test_the_slope_is_that_of_a_least_squares_line(values):
    expected = np.polyfit(np.arange(len(values)), np.array(values, np.float64), 1)[0]
    assert Series.of(values).slope(len(values)) == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_a_slope_needs_three_values():
    assert math.isnan(Series.of([1.0, 2.0]).slope(2))
    assert math.isnan(Series.of([1.0, float("nan"), 2.0]).slope(3))


class PlainBaseline:
    """What `Baseline` does, written down once more by means of numpy and without cleverness."""

    def __init__(self, spike):
        self.spike = spike
        self.accepted, self.outside = [], []
        self.since_refresh = 0
        self.center = self.reach = math.nan

    def refresh(self):
        recent = np.array(self.accepted[-self.spike.window :])
        self.center = float(np.median(recent))
        spread = MAD_TO_STD * float(np.median(np.abs(recent - self.center)))
        self.reach = min(max(self.spike.k * spread, self.spike.floor), self.spike.ceiling)
        self.since_refresh = 0

    def observe(self, value):
        if not (math.isfinite(value) and value > 0):
            return False, 0, self.center
        logarithm = float(np.log(np.float64(value)))
        outlier = logarithm > self.center + self.reach
        if outlier and self.since_refresh:
            self.refresh()
            outlier = logarithm > self.center + self.reach
        center, lasting = self.center, 0
        if outlier:
            self.outside.append(logarithm)
            lasting = len(self.outside)
            if lasting >= self.spike.readmit_after:
                self.accepted, self.outside = self.outside[-self.spike.window :], []
                self.center = self.reach = math.nan
                if len(self.accepted) >= self.spike.minimum:
                    self.refresh()
        else:
            self.outside = []
            self.accepted.append(logarithm)
            self.since_refresh += 1
            enough = len(self.accepted) >= self.spike.minimum
            if (enough and self.since_refresh >= 8) or len(self.accepted) == self.spike.minimum:
                self.refresh()
        return outlier, lasting, center


spikes = st.builds(
    lambda k, floor, ceiling, window, minimum, readmit: Spike(
        k=k, floor=floor, ceiling=ceiling, window=window, minimum=min(minimum, window), readmit_after=readmit
    ),
    st.floats(1, 8), st.floats(0, 1), st.floats(1, 5), st.integers(8, 24), st.integers(4, 24), st.integers(1, 24),
)  # fmt: skip
walks = st.lists(
    st.one_of(st.floats(0.5, 2, width=32), st.sampled_from([0.0, -1.0, 5.0, 5.0, 50.0, 1e30, math.nan, math.inf])),
    min_size=1, max_size=150,
)  # fmt: skip


def verdict(baseline, value):
    """What a baseline says about a value that it sees now."""
    baseline.observe(value)
    return baseline.latest


@settings(deadline=None)
@given(walks, spikes)
def test_a_baseline_judges_like_its_plain_twin(values, spike):
    baseline, twin = Baseline(spike), PlainBaseline(spike)
    for value in values:
        seen = verdict(baseline, value)
        outlier, lasting, center = twin.observe(value)
        assert seen.outlier == outlier
        assert seen.lasting == lasting
        assert math.isnan(center) or seen.level == pytest.approx(math.exp(center))


@settings(deadline=None)
@given(walks, spikes, st.integers(0, 150))
def test_a_baseline_goes_on_where_it_was_saved(values, spike, saved_at):
    straight, halted = Baseline(spike), Baseline(spike)
    for at, value in enumerate(values):
        if at == saved_at:
            halted = Baseline.from_state(spike, halted.state_dict())
        assert np.array_equal(verdict(straight, value), verdict(halted, value), equal_nan=True)


def test_nothing_is_judged_before_the_minimum():
    baseline = Baseline(Spike(minimum=32))
    verdicts = [verdict(baseline, 1.0 if at < 31 else 100.0).outlier for at in range(33)]
    assert not any(verdicts[:32])


def test_a_lasting_shift_is_accepted_after_thirty_two_outliers():
    baseline = Baseline(Spike())
    rng = np.random.default_rng(0)
    for _ in range(100):
        baseline.observe(math.exp(0.02 * rng.normal()))
    lasting = [verdict(baseline, 4 * math.exp(0.02 * rng.normal())).lasting for _ in range(60)]
    assert lasting[:32] == list(range(1, 33))
    assert not any(lasting[32:])


def test_the_reach_is_so_many_standard_deviations_of_normal_noise():
    spike = Spike(k=6.0, floor=0.0, window=4096, minimum=4096)
    baseline = Baseline(spike)
    for value in np.exp(np.random.default_rng(0).normal(0.0, 0.02, 4096)).tolist():
        baseline.observe(value)
    assert verdict(baseline, 1.0).reach == pytest.approx(6 * 0.02, rel=0.05)


def test_outliers_do_not_move_the_level_they_are_compared_with():
    baseline = Baseline(Spike())
    for _ in range(64):
        baseline.observe(1.0)
    levels = [verdict(baseline, 50.0).level for _ in range(31)]
    assert levels == [pytest.approx(1.0)] * 31


def test_a_reach_beyond_all_numbers_is_a_bound_all_the_same():
    baseline = Baseline(Spike(floor=1e4, ceiling=1e4))
    for _ in range(64):
        baseline.observe(1.0)
    assert 1e300 < verdict(baseline, 3e38).bound < math.inf


def test_a_panel_without_a_history_makes_its_own_baseline():
    panel = Panel(("a", "b"), np.arange(41), np.array([[1.0, 1.0]] * 40 + [[9.0, 1.0]], np.float32))
    assert [Series(panel, scope).deviation(Spike()).outlier for scope in "ab"] == [True, False]
    assert Series(panel, "a").deviation(Spike()).ratio == pytest.approx(9.0)


def spaced(values, every):
    """A series that is read every so many steps."""
    column = np.asarray(values, np.float32).reshape(-1, 1)
    return Series(Panel(("",), every * np.arange(len(column)), column))


def test_the_cadence_is_the_usual_distance_of_two_readings():
    assert Series.of([1.0, 2.0, 3.0]).cadence == 1
    assert spaced([1.0] * 9, every=10).cadence == 10
    assert Series.of([]).cadence == Series.of([1.0]).cadence == 1
    gaps = Panel(("",), np.array([0, 1, 2, 50, 51, 52]), np.ones((6, 1), np.float32))
    assert gaps.series().cadence == 1, "a gap is not how it is usually read"


def test_steps_and_readings_are_told_apart_by_the_cadence():
    assert spaced([1.0] * 9, every=10).readings_in(256) == 26
    assert spaced([1.0] * 9, every=10).steps_of(3) == 21, "from the first to the last"
    assert Series.of([1.0] * 9).readings_in(256) == 256
    assert spaced([1.0] * 9, every=1000).readings_in(256) == 1


def test_series_are_aligned_by_their_common_steps():
    steps, values = aligned(spaced([0.0, 1.0, 2.0, 3.0], every=2), spaced([0.0, 10.0, 20.0], every=3))
    assert steps.tolist() == [0, 6]
    assert values.tolist() == [[0.0, 3.0], [0.0, 20.0]]
    nothing, empty = aligned(Series.of([1.0]), Series.of([]))
    assert len(nothing) == 0
    assert empty.shape == (2, 0)


def test_the_ends_of_a_series_are_medians_of_its_first_and_last_part():
    assert Series.of([*range(20), np.nan]).ends(10) == (0.5, 18.5)
    assert np.isnan(Series.of([np.nan]).ends(4)).all()


def test_what_comes_last_in_a_row_is_counted():
    assert trailing(np.array([True, False, True, True])) == 2
    assert trailing(np.array([True, True])) == 2
    assert trailing(np.array([], np.bool_)) == 0
