import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forewarn.measure.engine import COLUMNS, measure, summarize
from forewarn.measure.engine.summary import rescale


def quantities_of(*tensors):
    return summarize(rows_of(tensors))


def rows_of(tensors):
    found = measure(tensors)
    rows = np.empty((len(tensors), len(COLUMNS)))
    rows[list(found.order)] = np.concatenate([np.asarray(part) for part in found.rows])
    return rows


def expected(values: np.ndarray) -> dict[str, float]:
    """The same quantities by float64 numpy."""
    values = values.astype(np.float64).ravel()
    finite = values[np.isfinite(values)]
    with np.errstate(all="ignore"):
        return {
            "norm": np.sqrt((finite**2).sum()),
            "mean": finite.mean() if len(finite) else np.nan,
            "std": finite.std() if len(finite) else np.nan,
            "min": finite.min() if len(finite) else np.nan,
            "max": finite.max() if len(finite) else np.nan,
            "zero_fraction": (values == 0).mean() if len(values) else np.nan,
            "nonfinite": len(values) - len(finite),
        }


def check(tensor: torch.Tensor, values: np.ndarray) -> None:
    found = quantities_of(tensor)
    for name, value in expected(values).items():
        np.testing.assert_allclose(found[name][0], np.float32(value), rtol=1e-5, atol=1e-30, err_msg=name)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 5000),
    st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16]),
    st.sampled_from([1e-30, 1e-3, 1.0, 1e3]),
    st.sets(st.sampled_from(["nan", "inf", "-inf", "zeros"])),
    st.integers(0, 2**31),
)
def test_every_quantity_equals_numpy_in_double_precision(size, dtype, magnitude, specials, seed):
    generator = torch.Generator().manual_seed(seed)
    tensor = (torch.randn(size, generator=generator, dtype=torch.float64) * magnitude).to(dtype)
    for at, special in enumerate(sorted(specials)):
        tensor[at :: 7 + at] = 0.0 if special == "zeros" else float(special)
    check(tensor, tensor.double().numpy())


def test_squares_near_the_end_of_float32_do_not_overflow():
    tensor = torch.full((100,), 1e20)
    assert quantities_of(tensor)["norm"][0] == pytest.approx(1e21, rel=1e-6)


def test_the_spread_of_a_nearly_constant_tensor_is_not_lost():
    tensor = 1.0 + 1e-4 * torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    assert quantities_of(tensor)["std"][0] == pytest.approx(tensor.double().std(correction=0).item(), rel=1e-5)


def test_a_missing_gradient_is_nan_and_keeps_its_place():
    found = quantities_of(torch.ones(4), None, torch.full((9,), 2.0))
    np.testing.assert_array_equal(found["norm"], np.float32([2.0, np.nan, 6.0]))
    assert np.isnan(found["nonfinite"][1])


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,)])
def test_zero_dimensional_and_empty_tensors_have_a_norm(shape):
    check(torch.full(shape, 3.0), np.full(shape, 3.0))


def test_a_sparse_gradient_counts_what_it_does_not_store_as_zeros():
    embedding = torch.nn.Embedding(10, 3, sparse=True)
    embedding(torch.tensor([1, 1, 4])).sum().backward()
    gradient = embedding.weight.grad
    assert not gradient.is_coalesced()
    check(gradient, gradient.to_dense().numpy())


def test_a_complex_gradient_is_read_as_its_two_parts():
    tensor = torch.tensor([3 + 4j, 0 + 1j])
    check(tensor, torch.view_as_real(tensor).numpy())


@pytest.mark.parametrize("layout", ["channels_last", "transposed", "strided"])
def test_memory_layout_does_not_matter(layout):
    tensor = torch.randn(4, 3, 6, 5, generator=torch.Generator().manual_seed(1))
    changed = {
        "channels_last": lambda: tensor.to(memory_format=torch.channels_last),
        "transposed": lambda: tensor.transpose(0, 3),
        "strided": lambda: tensor[:, :, ::2, 1:],
    }[layout]()
    check(changed, changed.contiguous().numpy())


def test_rows_of_parts_add_up_to_the_row_of_the_whole():
    whole = torch.randn(1000, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    parts = rows_of(list(whole.split(300)))
    together = rows_of([whole])[0]
    np.testing.assert_allclose(parts[:, [0, 1, 2, 5, 6]].sum(axis=0), together[[0, 1, 2, 5, 6]])
    assert parts[:, 3].min() == together[3]
    assert parts[:, 4].max() == together[4]


def test_rescaling_rows_is_rescaling_the_tensor():
    tensor = torch.randn(100, generator=torch.Generator().manual_seed(3))
    scaled = rescale(rows_of([tensor * 1024]), 1024.0)
    for name, value in summarize(scaled).items():
        np.testing.assert_allclose(value[0], quantities_of(tensor)[name][0], rtol=1e-6, err_msg=name)
