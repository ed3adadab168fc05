"""Norms of many tensors: by the C library where it can, else by torch, and always what numpy says."""

import math

import numpy as np
import pytest
import torch

from forewarn.measure.engine import native, norms
from forewarn.measure.engine.norms import norm_of_all


def as_floats(found):
    return [float(each) for each in found]


@pytest.mark.parametrize("is_native", [True, False])
def test_the_norm_of_each_tensor_and_of_all(monkeypatch, is_native):
    if not is_native:
        monkeypatch.setattr(native, "available", lambda: False)
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(size, generator=generator).to(dtype) for size, dtype in
               ((1, torch.float32), (5000, torch.float32), (33, torch.bfloat16), (70, torch.float64))]  # fmt: skip
    tensors.append(torch.randn(6, 8, generator=generator)[:, ::2])
    expected = [np.linalg.norm(each.double().numpy()) for each in tensors]
    found = norms(tensors)
    np.testing.assert_allclose(as_floats(found), expected, rtol=1e-6)
    assert float(norm_of_all(found)) == pytest.approx(np.linalg.norm(expected), rel=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_makes_its_norm_so_and_no_other(bad):
    found = as_floats(norms([torch.ones(4), torch.tensor([1.0, bad])]))
    assert found[0] == 2.0
    assert math.isnan(found[1]) if math.isnan(bad) else found[1] == math.inf


def test_large_finite_values_have_a_finite_norm():
    if not native.available():
        pytest.skip(native.why_not())
    assert as_floats(norms([torch.full((4,), 1e30)])) == pytest.approx([2e30])


def test_numbers_here_and_on_a_device_make_one_norm():
    assert norm_of_all([]) == 0.0
    assert norm_of_all([3.0, 4.0]) == 5.0
    assert float(norm_of_all([torch.tensor(3.0)])) == 3.0
    assert float(norm_of_all([2.0, torch.tensor(3.0), torch.tensor(6.0)])) == pytest.approx(7.0)
