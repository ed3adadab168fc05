"""What is said about the output of a layer, against numpy in double precision, by every way to read it."""

from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forewarn.measure.engine import layer_outputs as layers
from forewarn.measure.engine import native
from forewarn.measure.engine.layer_outputs import MOMENTS, Board, Layout, Look, Tally, channel_spread, describe, merge
from tests.measure.engine.code_paths import over_paths

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
LOW, HIGH = -0.5, 0.75

over_ways = over_paths("way", torch="torch")


@contextmanager
def reading_by(way):
    """Every tally in this block reads in the given way."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layers.native, "available", lambda: way != "torch")
        if way != "torch":
            prepare = layers.NativeTally.prepare
            patch.setattr(layers.NativeTally, "prepare", lambda self, layout, dtype: prepare(self, layout, dtype, way))
        yield


def random(shape, dtype, seed, *, wild):
    generator = np.random.default_rng(seed)
    values = generator.standard_normal(shape)
    values[generator.random(shape) < 0.4] = 0.0
    if wild and values.size:
        flat = values.reshape(-1)
        for special in (np.nan, np.inf, -np.inf, 1e-40, 6e4):
            flat[generator.integers(0, flat.size)] = special
    return torch.from_numpy(values).to(dtype)


def expected_row(values):
    finite = values[np.isfinite(values)]
    return np.array([
        values.size, finite.sum(), (finite**2).sum(), finite.min(initial=np.inf), finite.max(initial=-np.inf),
        (values == 0).sum(), values.size - finite.size, (finite**3).sum(), (finite**4).sum(),
    ])  # fmt: skip


def check_row(row, values):
    wanted = expected_row(values)
    exact = [0, 3, 4, 5, 6]
    np.testing.assert_array_equal(row[exact], wanted[exact])
    magnitudes = np.abs(values[np.isfinite(values)])
    for column, power in ((1, 1), (2, 2), (7, 3), (8, 4)):
        size = (magnitudes**power).sum()
        np.testing.assert_allclose(row[column], wanted[column], rtol=1e-11, atol=1e-11 * size)


def seen(tensors, layouts, look):
    board = Board()
    tally = Tally(board, look, LOW, HIGH)
    for tensor, layout in zip(tensors, layouts, strict=True):
        tally.add(tensor, layout)
    positions, fired, sums = (array[tally.place] for array in tally.shelf.take())
    rows, places, parts = board.take()
    assert places == parts == []
    return rows[0], fired.astype(bool), sums, positions.item()


@over_ways
@pytest.mark.parametrize("look", Look)
@settings(max_examples=15, deadline=None)
@given(
    st.integers(1, 40), st.sampled_from([1, 2, 15, 16, 17, 255, 257, 700]), st.sampled_from([1, 1, 2, 9, 300]),
    st.sampled_from([1, 3, 7]), st.sampled_from(DTYPES), st.booleans(), st.integers(0, 2**20),
)  # fmt: skip
def test_rows_and_units_equal_numpy(way, look, outer, units, inner, every, dtype, wild, seed):
    tensor = random((outer, units, inner), dtype, seed, wild=wild and look is not Look.CHANNELS)
    layout = Layout(outer, units, inner, every)
    with reading_by(way):
        row, fired, sums, positions = seen([tensor], [layout], look)
    read = tensor.double().numpy()[::every]
    check_row(row, read.ravel())
    assert positions == layout.positions == read.shape[0] * inner
    if look is Look.FIRED:
        np.testing.assert_array_equal(fired, (read != 0).any(axis=(0, 2)))
    elif look is Look.INSIDE:
        np.testing.assert_array_equal(sums, (~((read <= LOW) | (read >= HIGH))).sum(axis=(0, 2)))
    elif look is Look.PEAKED and not wild:
        np.testing.assert_array_equal(sums, [(read.max(axis=1) >= HIGH).sum(), read.shape[0] * inner])
    elif look is Look.CHANNELS:
        wanted = np.concatenate([read.sum(axis=(0, 2)), (read**2).sum(axis=(0, 2))])
        np.testing.assert_allclose(sums, wanted, rtol=1e-11, atol=1e-11)


@over_ways
@pytest.mark.parametrize("look", Look)
def test_parts_add_up_to_the_whole(way, look):
    whole = random((37, 50, 1), torch.float32, 3, wild=look is not Look.CHANNELS)
    parts = whole.split(10)
    with reading_by(way):
        one = seen([whole], [Layout(37, 50, 1)], look)
        many = seen(parts, [Layout(len(part), 50, 1) for part in parts], look)
    for together, added in zip(one, many, strict=True):
        np.testing.assert_allclose(added, together, rtol=1e-12)


@pytest.mark.skipif(not native.available(), reason=native.why_not())
@pytest.mark.parametrize("dtype", DTYPES)
def test_code_paths_give_the_same_bits(dtype):
    tensor = random((129, 413, 1), dtype, 5, wild=True)
    found = set()
    for way in native.paths():
        with reading_by(way):
            found.add(seen([tensor], [Layout(129, 413, 1)], Look.FIRED)[0].tobytes())
    assert len(found) == 1


def test_the_output_of_a_layer_is_described():
    values = np.random.default_rng(0).gamma(2.0, size=5000) - 1
    centred = values - values.mean()
    row = expected_row(values)
    nothing = np.array([0.0, 0, 0, np.inf, -np.inf, 0, 0, 0, 0])
    found = describe(np.stack([row, nothing]))
    assert found["kurtosis"][0] == pytest.approx((centred**4).mean() / (centred**2).mean() ** 2, rel=1e-6)
    assert found["abs_max"][0] == pytest.approx(np.abs(values).max())
    assert found["mean"][0] == pytest.approx(values.mean(), rel=1e-6)
    assert "norm" not in found
    assert all(np.isnan(each[1]) for each in found.values())


@pytest.mark.parametrize("values", [np.ones(100), np.array([]), 1e9 + np.arange(100.0)])
def test_a_kurtosis_that_would_be_rounding_is_left_out(values):
    assert np.isnan(describe(expected_row(values)[None])["kurtosis"][0])


def test_rows_of_parts_from_devices_are_added():
    values = [np.random.default_rng(seed).normal(size=30) for seed in range(3)]
    rows = np.stack([expected_row(values[0]), expected_row(np.array([]))])
    merge(rows, [0, 1], np.stack([expected_row(values[1]), expected_row(values[2])]))
    check_row(rows[0], np.concatenate(values[:2]))
    check_row(rows[1], values[2])


def test_the_spread_of_channels_is_that_of_their_means_and_deviations():
    values = np.random.default_rng(1).normal(size=(200, 6)) * [1, 2, 3, 1, 1, 1] + [0, 0, 0, 5, 0, 0]
    sums = np.concatenate([values.sum(0), (values**2).sum(0)])
    for either in (sums, torch.from_numpy(sums)):
        means, deviations = channel_spread(either, 200)
        assert float(means) == pytest.approx(values.mean(0).std())
        assert float(deviations) == pytest.approx(values.std(0).std())


def test_an_output_that_lies_scattered_in_memory_is_read_by_torch():
    tensor = random((6, 5, 8), torch.float32, 2, wild=False).transpose(0, 2)
    row, fired, *_ = seen([tensor], [Layout(8, 5, 6)], Look.FIRED)
    check_row(row, tensor.double().numpy().ravel())
    assert fired.all()


def test_units_that_change_in_number_start_anew_and_the_row_goes_on():
    first, second = torch.ones(3, 4), torch.zeros(5, 6)
    row, fired, _, positions = seen([first, second], [Layout(3, 4, 1), Layout(5, 6, 1)], Look.FIRED)
    assert row[0] == 12 + 30
    assert fired.tolist() == [False] * 6
    assert positions == 5


def test_a_board_keeps_the_addresses_of_its_rows_and_starts_anew_when_taken():
    board = Board()
    tallies = [Tally(board, Look.NOTHING) for _ in range(600)]
    for at, tally in enumerate(tallies):
        tally.add(torch.full((2, 2), float(at)), Layout(2, 2, 1))
    rows, _, _ = board.take()
    assert rows.shape == (600, len(MOMENTS))
    np.testing.assert_array_equal(rows[:, 4], np.arange(600.0))
    tallies[599].add(torch.ones(3), Layout(1, 3, 1))
    again, _, _ = board.take()
    assert again[599, 0] == 3
    assert not again[:599, 0].any()
    assert rows[0, 0] == 4
