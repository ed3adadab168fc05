"""Percentiles, shapes and whole histograms by the native library, against numpy."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from forewarn.histograms import PERCENTS
from forewarn.measure.engine import distributions, measure, native, spread_of
from forewarn.measure.engine.distributions import Spread, shape
from forewarn.measure.engine.native import library
from forewarn.types import Counts, Shape
from tests.measure.engine.distributions.made import histogram, row
from tests.measure.engine.distributions.test_shape import KINDS

pytestmark = pytest.mark.skipif(not native.available(), reason=native.why_not())

HUGE = 2**40


def assert_same(found: Spread, expected: Spread) -> None:
    """To the last bit, but for percentiles: these may differ in the last bit of a float32, by other logarithms."""
    assert np.array_equal(found.shapes, expected.shapes, equal_nan=True)
    assert np.array_equal(found.counts, expected.counts)
    assert np.array_equal(found.zeros, expected.zeros)
    assert list(found.percentiles) == list(expected.percentiles) == list(PERCENTS)
    for name, values in found.percentiles.items():
        known = ~np.isnan(values)
        assert np.array_equal(known, ~np.isnan(expected.percentiles[name]))
        np.testing.assert_array_max_ulp(values[known], expected.percentiles[name][known], maxulp=1)
    for array in (found.shapes, *found.percentiles.values()):
        assert array.dtype == np.float32


def both(counts: Counts, rows: np.ndarray) -> Spread:
    """What the library says, which is what numpy says; the given arrays stay as they are."""
    before = counts.copy(), rows.copy()
    found = native.spread_of(counts, rows)
    assert_same(found, distributions.spread_of(counts, rows))
    assert np.array_equal(counts, before[0])
    assert np.array_equal(rows, before[1], equal_nan=True)
    return found


VALUES = st.lists(
    st.tuples(
        st.sampled_from([-1.0, 1.0]),
        st.floats(-45, 30) | st.integers(-45, 30) | st.sampled_from([-1000.0, 1000.0]),
        st.integers(1, 300) | st.just(HUGE),
    ),
    max_size=12,
)
"""A sign, a power of two, maybe beyond the bins, and how many values have them."""


@st.composite
def counted_tensors(draw):
    """The histogram and the row of a tensor, but for its moments, which are anything."""
    counts, extremes = np.zeros((2, 64), np.int64), []
    for sign, power, count in draw(VALUES):
        counts[int(sign > 0), np.clip(np.floor(power) + 40, 0, 63).astype(int)] += count
        extremes.append(sign * 2.0**power)
    zeros, nonfinite = draw(st.sampled_from([0, 0, 1, 500, HUGE])), draw(st.sampled_from([0, 3]))
    extremes += [0.0] if zeros else []
    nonzero = int(counts.sum() * draw(st.sampled_from([1.0, 1.0, 1.001, 1.5, 4.0]))) + draw(st.sampled_from([0, 0, 70]))
    mean = np.float64(draw(st.sampled_from([0.0, 1.0, -3.0, 1e-9, 1e200, np.inf])))
    relative = draw(st.sampled_from([0.0, 1e-6, 0.5, 1.0, 1.5, 1e4]))
    with np.errstate(over="ignore", invalid="ignore"):
        deviation = relative * max(abs(mean), 1e-6)
        moments = [nonzero * mean, nonzero * (mean * mean + deviation * deviation)]
    ends = [min(extremes, default=np.inf), max(extremes, default=-np.inf)]
    return counts, [nonzero + zeros + nonfinite, *moments, *ends, zeros, nonfinite]


NOTHING = (np.zeros((2, 64), np.int64), [np.nan] * 7)


@given(st.lists(counted_tensors() | st.just(NOTHING), max_size=6))
@settings(max_examples=400, deadline=None)
@example([NOTHING])
@example([])
def test_any_histograms_say_the_same_in_c(tensors):
    counts = np.array([each for each, _ in tensors], np.int64).reshape(-1, 2, 64)
    rows = np.array([each for _, each in tensors], np.float64).reshape(-1, 7)
    both(counts, rows)


@pytest.mark.parametrize("histogram_blocks", [2, 16])
@pytest.mark.parametrize("size", [30, 3_000, 30_000])
def test_tensors_of_every_kind_say_the_same_in_c(size, histogram_blocks):
    random = np.random.default_rng(size)
    tensors = [torch.from_numpy(draw(random, size) * 2.0 ** random.uniform(-30, 10)) for _, draw in KINDS.values()]
    spoiled = tensors[0].clone()
    spoiled[::7], spoiled[::11] = torch.nan, torch.inf
    odd = [spoiled, torch.empty(0), torch.zeros(500), torch.full((200,), torch.nan), torch.tensor([1e300, -1e300, 0])]
    measured = measure([*tensors, *odd, None], histogram_blocks)
    rows, counts = (np.concatenate(each) for each in (measured.rows, measured.histograms))
    found = both(counts, rows)
    scaled = (found.counts != counts).any()
    assert scaled == (histogram_blocks == 2 and size > 2 * 4096)
    if size >= 3_000 and not scaled:
        assert [Shape(int(each)) for each in found.shapes[: len(KINDS)]] == [kind for kind, _ in KINDS.values()]


def of_normal_values(size: int) -> tuple[Counts, np.ndarray]:
    values = np.random.default_rng(0).normal(size=size)
    return histogram(values)[0], row(values)


@pytest.mark.parametrize("bound", ["HEAVY_KURTOSIS", "SHIFTED_MEAN", "COLLAPSED_SPREAD"])
def test_at_a_bound_itself_both_say_the_same(bound):
    """Rows at the bound and a bit to either side of it."""
    counts, rows = of_normal_values(5000)
    close = [1.0, np.nextafter(1.0, 0), np.nextafter(1.0, 2), 1 - 1e-15, 1 + 1e-15]
    if bound == "HEAVY_KURTOSIS":
        tails = np.arange(400)  # one of these numbers of values far outside is where it begins
        counts, rows = np.repeat(counts, 400, axis=0), np.repeat(rows, 400, axis=0)
        counts[:, 1, 46] += tails
        rows[:, 0] += tails
    else:
        wanted = [getattr(shape, bound) ** (-1 if bound == "SHIFTED_MEAN" else 1) * each for each in close]
        counts, rows = np.repeat(counts, len(close), axis=0), np.repeat(rows, len(close), axis=0)
        rows[:, 1] = 3.0 * 5000
        rows[:, 2] = 5000 * (9.0 + (3.0 * np.array(wanted)) ** 2)
    found = both(counts, rows)
    if bound == "HEAVY_KURTOSIS":
        assert {Shape.HEALTHY, Shape.HEAVY_TAILS} <= set(found.shapes)


@pytest.mark.parametrize("around", ["modes", "tails", "few"])
def test_thousands_of_histograms_close_to_the_bounds_have_the_same_shapes(around):
    random, num = np.random.default_rng(0), 20_000
    counts = np.zeros((num, 2, 64), np.int64)
    if around == "modes":  # peaks and valleys of about as many values as it takes
        counts[:, :, 28:44] = random.choice([0, 0, 0, 1, 16, 17, 49, 50, 51, 150, 1000], (num, 2, 16))
    elif around == "tails":  # a heap, and about as many values far from it as it takes
        counts[:, :, 28:40] = random.integers(900, 1100, (num, 2, 12)) * 2 ** np.arange(12) // 256
        counts[:, :, 42] = random.integers(0, 40, (num, 2))
    else:
        counts[:, :, 38:40] = random.choice([24, 25, 26], (num, 2, 2))
    magnitudes = 1.5 * 2.0 ** np.arange(-40, 24)
    moments = [(counts[:, 1] - counts[:, 0]) @ magnitudes, counts.sum(axis=1) @ (magnitudes * magnitudes)]
    nothing, counted = np.zeros(num), counts.sum(axis=(1, 2)).astype(np.float64)
    found = both(counts, np.stack([counted, *moments, nothing - 1e4, nothing + 1e4, nothing, nothing], axis=1))
    seen = {Shape(int(each)) for each in found.shapes if not np.isnan(each)}
    expected = {"modes": Shape.MULTI_MODAL, "tails": Shape.HEAVY_TAILS, "few": Shape.HEALTHY}[around]
    assert {Shape.HEALTHY, expected} <= seen
    assert np.isnan(found.shapes).any() == (around == "few")


def test_the_bounds_of_shapes_are_those_of_numpy(monkeypatch):
    """They are handed over, not written down twice."""
    fields = native.spreads._BOUNDS_OF_SHAPES
    assert [getattr(native.spreads._BOUNDS, name) for name in fields] == [
        getattr(shape, name.upper()) for name in fields
    ]
    counts, rows = of_normal_values(5000)
    monkeypatch.setattr(native.spreads._BOUNDS, "least_values", 5001.0)
    assert np.isnan(native.spread_of(counts, rows).shapes[0])


def test_counts_that_need_no_scaling_are_handed_through():
    counts, rows = of_normal_values(3000)
    assert native.spread_of(counts, rows).counts is counts
    rows[0, 0] *= 2
    scaled = native.spread_of(counts, rows).counts
    assert scaled is not counts
    assert np.array_equal(scaled, 2 * counts)
    several, rows = np.repeat(counts, 3, axis=0), np.repeat(rows, 3, axis=0)
    rows[[0, 2], 0] /= 2
    assert np.array_equal(native.spread_of(several, rows).counts, several * np.array([1, 2, 1])[:, None, None])


def test_arrays_in_another_order_are_read_all_the_same():
    counts, rows = of_normal_values(3000)
    several, their_rows = np.repeat(counts, 5, axis=0), np.repeat(rows, 5, axis=0)
    found = native.spread_of(np.asfortranarray(several)[::2], np.asfortranarray(their_rows)[::2])
    assert_same(found, distributions.spread_of(several[:3], their_rows[:3]))


def test_histograms_and_rows_of_different_tensors_are_refused():
    counts, rows = of_normal_values(300)
    for wrong in (np.repeat(rows, 2, axis=0), rows[:, :6]):
        with pytest.raises(ValueError, match="must be for the same number of tensors"):
            native.spread_of(counts, wrong)
    with pytest.raises(ValueError, match="must be for the same number of tensors"):
        native.spread_of(counts[:, :1], rows)


def test_the_host_may_take_denormal_numbers_for_zeros():
    values = np.array([1e-310, 2e-310, -3e-310] * 50)
    counts, rows = histogram(values)[0], row(values)
    expected = distributions.spread_of(counts, rows)
    torch.set_flush_denormal(True)
    try:
        assert_same(native.spread_of(counts, rows), expected)
    finally:
        torch.set_flush_denormal(False)


def test_other_threads_go_on_meanwhile():
    counts, rows = (np.repeat(each, 20_000, axis=0) for each in of_normal_values(3000))
    ticks: list[float] = []
    over = threading.Event()

    def tick() -> None:
        while not over.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0.0005)

    thread = threading.Thread(target=tick)
    thread.start()
    began = time.perf_counter()
    for _ in range(5):
        native.spread_of(counts, rows)
    ended = time.perf_counter()
    over.set()
    thread.join()
    assert sum(began < each < ended for each in ticks) > 5


@pytest.mark.parametrize("built", [True, False])
def test_without_the_library_numpy_is_used(monkeypatch, built):
    counts, rows = of_normal_values(3000)
    called = []
    monkeypatch.setattr(native, "spread_of", lambda *given: called.append("native") or distributions.spread_of(*given))
    if not built:
        monkeypatch.setattr(library, "_loaded", lambda: "there is no library")
    assert_same(spread_of(counts, rows), distributions.spread_of(counts, rows))
    assert called == (["native"] if built else [])
