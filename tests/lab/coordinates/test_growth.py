"""Exponents against numpy's own fit, and what is said of them."""

import numpy as np
import pytest

from forewarn.lab.coordinates.exponents import Growth, Term, Trend, growth, unclear, unstable

WIDTHS = (32, 64, 128, 256)


def test_an_exact_power_has_its_exponent_and_no_error():
    values = np.array([[3.0 * width**0.5] * 2 for width in WIDTHS])
    found = growth(WIDTHS, values)
    assert found.exponent == pytest.approx(0.5)
    assert found.error == pytest.approx(0.0, abs=1e-7)


def test_exponent_and_error_equal_those_of_numpy():
    values = np.exp(np.random.default_rng(0).normal(size=(4, 3)))
    x, y = np.log(np.repeat(WIDTHS, 3)), np.log(values).ravel()
    slope, covariance = np.polyfit(x, y, 1, cov="unscaled")
    variance = ((y - np.polyval(slope, x)) ** 2).sum() / (len(x) - 2)
    found = growth(WIDTHS, values)
    assert found.exponent == pytest.approx(slope[0])
    assert found.error == pytest.approx(np.sqrt(variance * covariance[0, 0]))


@pytest.mark.parametrize("wrong", [0.0, np.nan, np.inf])
def test_a_value_that_has_no_logarithm_makes_the_trend_unclear(wrong):
    values = np.ones((4, 2))
    values[2, 1] = wrong
    assert growth(WIDTHS, values).trend is Trend.UNCLEAR


def test_two_widths_are_too_few():
    with pytest.raises(ValueError, match="2 widths are too few"):
        growth((32, 64), np.ones((2, 3)))


@pytest.mark.parametrize(
    ("exponent", "error", "trend"),
    [(1.0, 0.05, "grows"), (0.26, 0.0, "grows"), (0.2, 0.1, "stays"), (-0.25, 0.1, "stays"), (-0.5, 0.1, "shrinks"),
     (1.5, 0.2, "grows"), (0.3, 0.2, "unclear"), (0.1, 0.2, "unclear"), (0.0, np.inf, "unclear"),
     (np.nan, 0.0, "unclear"), (1.0, np.nan, "unclear")],
)  # fmt: skip
def test_a_trend_is_half_way_to_the_next_half_and_needs_an_error_that_is_small_beside_it(exponent, error, trend):
    assert Growth(exponent, error).trend == trend


def test_a_layer_is_unstable_where_anything_grows_or_its_own_update_shrinks():
    stays, grows, more, shrinks = (Growth(each, 0.01) for each in (0.0, 0.5, 1.0, -0.5))
    growths = {
        "both": {Term.UPDATE: grows, Term.PASSED_ON: more},
        "learns less": {Term.UPDATE: shrinks, Term.PASSED_ON: stays},
        "passes on less": {Term.UPDATE: stays, Term.PASSED_ON: shrinks},
        "embedding": {Term.UPDATE: stays},
        "inputs alone": {Term.UPDATE: stays, Term.INPUT: more},
        "scattered": {Term.UPDATE: Growth(0.0, 0.5)},
    }
    found = unstable(growths)
    assert found == {"both": (Term.PASSED_ON, more), "learns less": (Term.UPDATE, shrinks)}
    assert unclear(growths) == ["scattered"]


def test_an_exponent_reads_with_its_sign_and_error():
    assert str(Growth(-0.123, 0.02)) == "−0.12 ± 0.02"
    assert str(Growth(1.0, 0.046)) == "+1.00 ± 0.05"
