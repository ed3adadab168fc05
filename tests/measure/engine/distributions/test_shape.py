"""Shapes of distributions whose kind is known."""

from __future__ import annotations

import numpy as np
import pytest

from forewarn.measure.engine.distributions import shapes
from forewarn.types import Shape
from tests.measure.engine.distributions.made import histogram, row

KINDS = {
    "normal": (Shape.HEALTHY, lambda r, n: r.normal(size=n)),
    "uniform": (Shape.HEALTHY, lambda r, n: r.uniform(-1, 1, n)),
    "uniform above zero": (Shape.HEALTHY, lambda r, n: r.uniform(0, 1, n)),
    "half normal": (Shape.HEALTHY, lambda r, n: np.abs(r.normal(size=n))),
    "exponential": (Shape.HEALTHY, lambda r, n: r.exponential(size=n)),
    "laplace": (Shape.HEALTHY, lambda r, n: r.laplace(size=n)),
    "logistic": (Shape.HEALTHY, lambda r, n: r.logistic(size=n)),
    "normal, most of it zero": (Shape.HEALTHY, lambda r, n: r.normal(size=n) * (r.random(n) < 0.1)),
    "off centre by half a deviation": (Shape.HEALTHY, lambda r, n: r.normal(0.5, 1, n)),
    "two scales around one centre": (Shape.HEALTHY, lambda r, n: r.normal(size=n) * r.choice([1.0, 30.0], n)),
    "shifted normal": (Shape.SHIFTED, lambda r, n: r.normal(3, 1, n)),
    "shifted to the other side": (Shape.SHIFTED, lambda r, n: r.normal(-5, 1, n)),
    "trained LayerNorm": (Shape.SHIFTED, lambda r, n: r.normal(1, 0.05, n)),
    "LayerNorm after a step": (Shape.SHIFTED, lambda r, n: 1 + 1e-3 * r.choice([-1.0, 1.0], n)),
    "student, 2 degrees": (Shape.HEAVY_TAILS, lambda r, n: r.standard_t(2, n)),
    "cauchy": (Shape.HEAVY_TAILS, lambda r, n: r.standard_cauchy(n)),
    "lognormal with signs": (Shape.HEAVY_TAILS, lambda r, n: np.exp(1.5 * r.normal(size=n)) * r.choice([-1, 1], n)),
    "normal with outliers": (Shape.HEAVY_TAILS, lambda r, n: r.normal(size=n) * np.where(r.random(n) < 0.01, 100, 1)),
    "nearly constant": (Shape.COLLAPSED, lambda r, n: 0.3 + 1e-8 * r.normal(size=n)),
    "nearly constant or zero": (Shape.COLLAPSED, lambda r, n: (0.3 + 1e-8 * r.normal(size=n)) * (r.random(n) < 0.5)),
    "two modes around zero": (Shape.MULTI_MODAL, lambda r, n: r.choice([-1.0, 1.0], n) + 0.1 * r.normal(size=n)),
    "two modes above zero": (Shape.MULTI_MODAL, lambda r, n: r.choice([1.0, 8.0], n) + 0.1 * r.normal(size=n)),
    "a small mode far away": (Shape.MULTI_MODAL, lambda r, n: r.normal(size=n) + 50 * (r.random(n) < 0.15)),
    "a point and a bell": (Shape.MULTI_MODAL, lambda r, n: np.where(r.random(n) < 0.5, 1e-6, r.normal(3, 0.3, n))),
    "signs": (Shape.MULTI_MODAL, lambda r, n: r.choice([-1.0, 1.0], n)),
    "constant": (Shape.CONSTANT, lambda r, n: np.ones(n)),
    "all zero": (Shape.CONSTANT, lambda r, n: np.zeros(n)),
}  # fmt: skip


def shape_of(values) -> float:
    return float(shapes(histogram(values)[0], row(values))[0])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [3_000, 30_000])
def test_each_kind_is_told(kind, size):
    expected, draw = KINDS[kind]
    random = np.random.default_rng(len(kind))
    for exponent in (-12.3, -5.0, 0.0, 0.4, 0.7, 2.6):  # wherever the edges of the bins happen to lie
        assert Shape(int(shape_of(draw(random, size) * 2.0**exponent))) is expected


@pytest.mark.parametrize("size", [100, 150, 300, 1000])
def test_small_healthy_tensors_are_not_accused(size):
    random = np.random.default_rng(size)
    draws = [random.normal, random.uniform, random.laplace, random.logistic]
    found = [shape_of(draw(size=size) - (draw is random.uniform) * 0.5) for draw in draws for _ in range(100)]
    assert np.mean(np.array(found) == Shape.HEALTHY) >= 0.99


def test_too_few_values_have_no_shape():
    random = np.random.default_rng(0)
    assert np.isnan(shape_of(random.normal(size=99)))
    assert np.isnan(shape_of(np.ones(99)))
    assert np.isnan(shape_of([]))
    assert np.isnan(shape_of(np.full(500, np.nan)))
    assert np.isnan(shape_of([*np.zeros(1000), *random.normal(size=50)]))


def test_values_that_are_not_finite_are_left_out():
    random = np.random.default_rng(0)
    values = random.normal(size=2000)
    values[::10], values[1::50] = np.nan, np.inf
    assert shape_of(values) == Shape.HEALTHY


def test_a_tensor_without_a_row_has_no_shape():
    assert np.isnan(shapes(np.zeros((1, 2, 64), np.int64), np.full((1, 7), np.nan))[0])


def test_many_tensors_are_judged_like_each_alone():
    random = np.random.default_rng(3)
    tensors = [draw(random, 3000) for _, draw in KINDS.values()] + [np.zeros(0)]
    counts = np.concatenate([histogram(each)[0] for each in tensors])
    rows = np.concatenate([row(each) for each in tensors])
    assert np.array_equal(shapes(counts, rows), [shape_of(each) for each in tensors], equal_nan=True)


def test_every_shape_has_words():
    assert len({str(shape) for shape in Shape}) == len(Shape)
