"""Percentiles from histograms against sorted values."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forewarn.histograms import PERCENTS
from forewarn.measure.engine.distributions import percentiles
from tests.measure.engine.distributions.made import histogram, ranked

IN_RANGE = st.floats(2.0**-40, 2.0**23, width=32) | st.floats(-(2.0**23), -(2.0**-40), width=32) | st.just(0.0)
ANYTHING = st.floats(allow_nan=False, allow_infinity=False, width=32)


def estimated(values) -> dict[str, float]:
    values = np.asarray(values, np.float64)
    least, most = (values.min(), values.max()) if len(values) else (np.inf, -np.inf)
    found = percentiles(*histogram(values), np.array([least]), np.array([most]))
    return {name: float(one[0]) for name, one in found.items()}


@given(st.lists(IN_RANGE, min_size=1, max_size=60))
@settings(max_examples=300)
def test_an_estimate_is_never_off_by_more_than_a_factor_of_two(values):
    found = estimated(values)
    for name, percent in PERCENTS.items():
        true = ranked(values, percent)
        assert np.sign(found[name]) == np.sign(true)
        assert abs(true) / 2 * (1 - 1e-5) <= abs(found[name]) <= abs(true) * 2 * (1 + 1e-5)
        assert np.float32(min(values)) <= found[name] <= np.float32(max(values))


@given(st.lists(ANYTHING, min_size=1, max_size=60))
def test_beyond_the_bins_the_sign_the_order_and_the_extremes_still_hold(values):
    found = list(estimated(values).values())
    assert found == sorted(found)
    assert np.float32(min(values)) <= found[0]
    assert found[-1] <= np.float32(max(values))
    for estimate, percent in zip(found, PERCENTS.values(), strict=True):
        true = ranked(values, percent)
        assert np.sign(estimate) == np.sign(true) or abs(true) < 2.0**-39


@pytest.mark.parametrize("scale", [1e-6, 0.02, 1.0, 1.37, 300.0])
@pytest.mark.parametrize(
    ("kind", "bound"), [("normal", 0.04), ("laplace", 0.04), ("uniform", 0.1), ("logistic", 0.04), ("standard_t", 0.04)]
)
def test_smooth_distributions_come_close(kind, bound, scale):
    random = np.random.default_rng(0)
    values = scale * (random.standard_t(3, 100_000) if kind == "standard_t" else getattr(random, kind)(size=100_000))
    values = 2 * values - scale if kind == "uniform" else values
    found = estimated(values)
    for name, percent in PERCENTS.items():
        if name != "p50":  # which lies at zero, where a relative error means nothing
            assert found[name] == pytest.approx(ranked(values, percent), rel=bound)
    assert abs(found["p50"]) < 0.01 * values.std()


def test_a_constant_a_single_value_and_zeros_are_exact():
    assert set(estimated(np.full(1000, 0.3)).values()) == {float(np.float32(0.3))}
    assert set(estimated([-7.0]).values()) == {-7.0}
    assert set(estimated([0.0, 0.0, 0.0]).values()) == {0.0}
    assert estimated([0.0] * 90 + [5.0] * 10)["p75"] == 0.0
    assert 4.0 <= estimated([0.0] * 90 + [5.0] * 10)["p95"] <= 5.0


def test_the_last_of_very_many_values_in_a_bin_is_not_taken_for_the_maximum():
    """Where the density falls so steeply that a float32 takes what is left for nothing."""
    counts = np.zeros((1, 2, 64), np.int64)
    counts[0, 1, [40, 41, 45]] = [99 * 2**21, 1, 2**21 - 1]
    found = percentiles(counts, np.array([0]), np.array([1.0]), np.array([60.0]))
    assert 1.0 <= found["p95"][0] <= found["p99"][0] <= 2.0


def test_nothing_has_no_percentiles():
    assert np.isnan(list(estimated([]).values())).all()


def test_tensors_do_not_disturb_each_other():
    random = np.random.default_rng(1)
    tensors = [random.normal(0, 10.0**at, 50 + at) for at in range(-6, 6)] + [np.zeros(0), np.zeros(3)]
    counts, zeros = (np.concatenate(part) for part in zip(*map(histogram, tensors), strict=True))
    least = np.array([each.min() if len(each) else np.inf for each in tensors])
    most = np.array([each.max() if len(each) else -np.inf for each in tensors])
    found = percentiles(counts, zeros, least, most)
    for at, each in enumerate(tensors):
        alone = estimated(each)
        assert [found[name][at] for name in PERCENTS] == pytest.approx(list(alone.values()), rel=1e-6, nan_ok=True)
