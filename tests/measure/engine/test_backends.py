"""Every backend against float64 numpy: rows and histograms of whatever bits a tensor may hold."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forewarn.measure.engine import native, portable
from forewarn.measure.engine.statistics import ALL_BLOCKS, COLUMNS, LOWEST_EXPONENT, NUM_BINS
from tests.measure.engine.code_paths import over_paths

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTEGERS = {torch.float32: np.int32, torch.float64: np.int64, torch.float16: np.int16, torch.bfloat16: np.int16}
SIZES = st.one_of(st.integers(0, 70), st.integers(4080, 4110), st.integers(0, 100_003), st.just(100_003))


def by_torch(tensors):
    rows, histograms = portable.measure(tensors, histogram=True)
    return rows.numpy(), histograms.numpy()


def by_path(path):
    def measure(tensors):
        assert all(map(native.supports, tensors))
        rows, histograms, covered = native.measure(tensors, histogram_blocks=ALL_BLOCKS, path=path)
        assert covered.tolist() == [tensor.numel() for tensor in tensors]
        return rows, histograms

    return measure


over_backends = over_paths("measure", torch=by_torch, made=by_path)


def expected_row(values: np.ndarray) -> np.ndarray:
    finite = values[np.isfinite(values)]
    with np.errstate(over="ignore"):
        return np.array(
            [
                values.size,
                finite.sum(),
                (finite * finite).sum(),
                finite.min(initial=np.inf),
                finite.max(initial=-np.inf),
                (values == 0).sum(),
                values.size - finite.size,
            ]
        )


def expected_histogram(values: np.ndarray) -> np.ndarray:
    counted = values[np.isfinite(values) & (values != 0)]
    bins = np.clip(np.frexp(counted)[1] - 1 - LOWEST_EXPONENT, 0, NUM_BINS - 1)
    return np.stack([np.bincount(bins[sign], minlength=NUM_BINS) for sign in (counted < 0, counted > 0)])


def check(measure, tensors) -> None:
    rows, histograms = measure(tensors)
    assert rows.shape == (len(tensors), len(COLUMNS))
    for tensor, row, histogram in zip(tensors, rows, histograms, strict=True):
        values = tensor.detach().double().numpy().ravel()
        wanted = expected_row(values)
        sums, others = [1, 2], [0, 3, 4, 5, 6]
        np.testing.assert_array_equal(row[others], wanted[others])
        # Sums in double precision, added in another order: off by rounding, in units of what was added.
        scale = np.abs(values[np.isfinite(values)]).sum(), wanted[2]
        for column, size in zip(sums, scale, strict=True):
            np.testing.assert_allclose(row[column], wanted[column], rtol=1e-12, atol=1e-12 * min(size, 1e308))
        np.testing.assert_array_equal(histogram, expected_histogram(values))


def any_bits(dtype, size, generator) -> torch.Tensor:
    """Every kind of number there is, each exponent as likely as any other: denormal, huge, infinite, NaN."""
    integer = INTEGERS[dtype]
    bits = generator.integers(np.iinfo(integer).min, np.iinfo(integer).max, size, dtype=integer, endpoint=True)
    tensor = torch.from_numpy(bits).view(dtype)
    # The sum of many of the largest doubles overflows, now or later, by the order in which they are added.
    return tensor.where(tensor.abs() < 1e302, 1e302) if dtype is torch.float64 else tensor


def healthy(dtype, size, generator) -> torch.Tensor:
    values = generator.standard_normal(size) * 10.0 ** generator.integers(-9, 4)
    values[generator.random(size) < generator.choice([0, 0.01, 0.9])] = generator.choice([0.0, -0.0])
    return torch.from_numpy(values).to(dtype)


def with_a_few_others(dtype, size, generator) -> torch.Tensor:
    tensor = healthy(dtype, size, generator)
    for special in (np.nan, np.inf, -np.inf, -0.0, torch.finfo(dtype).tiny / 2, -torch.finfo(dtype).smallest_normal):
        tensor[torch.from_numpy(generator.integers(0, max(size, 1), min(size, 2)))] = special
    return tensor


def constant(dtype, size, generator) -> torch.Tensor:
    return torch.full((size,), float(generator.choice([0.0, -0.0, 1.0, -3e-7, np.nan, np.inf])), dtype=dtype)


@over_backends
@settings(max_examples=80, deadline=None)
@given(
    SIZES,
    st.sampled_from(DTYPES),
    st.sampled_from([any_bits, healthy, with_a_few_others, constant]),
    st.integers(0, 2**32),
)
def test_rows_and_histograms_equal_numpy_in_double_precision(measure, size, dtype, kind, seed):
    check(measure, [kind(dtype, size, np.random.default_rng(seed))])


@over_backends
@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3000), st.sampled_from(DTYPES)), min_size=1, max_size=12), st.integers(0, 99))
def test_many_tensors_of_mixed_sizes_and_types_keep_their_order(measure, kinds, seed):
    generator = np.random.default_rng(seed)
    check(measure, [with_a_few_others(dtype, size, generator) for size, dtype in kinds])


@over_backends
@settings(max_examples=25, deadline=None)
@given(st.sampled_from(DTYPES), st.permutations(range(4)), st.integers(0, 7), st.integers(0, 99))
def test_the_order_in_memory_does_not_matter(measure, dtype, order, skipped, seed):
    """Dense tensors with their dimensions in any order, and from any place in their storage on."""
    flat = healthy(dtype, 7 + 3 * 5 * 6 * 47, np.random.default_rng(seed))
    tensor = flat[skipped : skipped + 3 * 5 * 6 * 47].view(3, 5, 6, 47).permute(order)
    check(measure, [tensor, tensor.contiguous(memory_format=torch.channels_last)])


@over_backends
@settings(max_examples=25, deadline=None)
@given(st.integers(1, 20_000), st.integers(1, 20_000), st.sampled_from(DTYPES), st.integers(0, 99))
def test_rows_and_histograms_of_parts_add_up_to_those_of_the_whole(measure, size, part, dtype, seed):
    whole = with_a_few_others(dtype, size, np.random.default_rng(seed))
    rows, histograms = measure([whole, *whole.split(part)])
    added = [0, 5, 6]
    np.testing.assert_array_equal(rows[1:, added].sum(axis=0), rows[0, added])
    np.testing.assert_allclose(rows[1:, 2].sum(), rows[0, 2], rtol=1e-12)
    np.testing.assert_allclose(rows[1:, 1].sum(), rows[0, 1], atol=1e-12 * size**0.5 * rows[0, 2] ** 0.5)
    assert (rows[1:, 3].min(), rows[1:, 4].max()) == (rows[0, 3], rows[0, 4])
    np.testing.assert_array_equal(histograms[1:].sum(axis=0), histograms[0])


@over_backends
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_power_of_two_is_in_its_bin(measure, dtype):
    """And the largest number below it in the bin below."""
    smallest, largest = (-24, 15) if dtype is torch.float16 else (-60, 60)
    powers = torch.from_numpy(2.0 ** np.arange(smallest, largest + 1)).to(dtype)
    below = torch.from_numpy(powers.view(torch.uint8).numpy().view(INTEGERS[dtype]) - 1).view(dtype)
    check(measure, [powers, -powers, below, -below])
    _, histograms = measure([powers])
    assert histograms[0, 1].max() == 1 + max(0, -40 - smallest, largest - 23)


@over_backends
def test_denormal_halves_are_counted_where_their_magnitude_is(measure):
    denormals = torch.arange(1, 1024, dtype=torch.int16).view(torch.float16)
    _, histograms = measure([denormals])
    assert histograms[0, 1].nonzero()[0].tolist() == list(range(40 - 24, 40 - 14))
    check(measure, [denormals, -denormals])


@over_backends
def test_huge_finite_doubles_are_finite(measure):
    tensor = torch.full((5000,), 1e200, dtype=torch.float64)
    tensor[1::2] = -1e200
    row = measure([tensor])[0][0]
    assert row.tolist() == [5000, row[1], np.inf, -1e200, 1e200, 0, 0]
    assert abs(row[1]) < 1e190


@over_backends
def test_nothing_but_nan_has_no_extremes(measure):
    rows, histograms = measure([torch.full((5000,), np.nan), torch.empty(0), torch.empty(3, 0)])
    np.testing.assert_array_equal(rows[:, 3:5], [[np.inf, -np.inf]] * 3)
    assert rows[:, 6].tolist() == [5000, 0, 0]
    assert not histograms.any()
