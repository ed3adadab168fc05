"""Exact percentiles against sorted values."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from forewarn.histograms import PERCENTS
from forewarn.measure.engine.quantiles import exact_percentiles
from tests.measure.engine.distributions.made import ranked

WANTED = list(PERCENTS.values())


def expected(values) -> list[float]:
    finite = values[np.isfinite(values)]
    return [ranked(finite, percent) if len(finite) else float("nan") for percent in WANTED]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1, 2, 99, 100, 101, 5000])
def test_a_percentile_is_the_value_of_that_rank(dtype, size):
    tensor = torch.randn(size, generator=torch.Generator().manual_seed(size)).to(dtype)
    order, (found,) = exact_percentiles([tensor], WANTED)
    assert order == [0]
    assert found.tolist() == [expected(tensor.double().numpy())]


def test_what_is_not_finite_is_left_out():
    tensor = torch.tensor([3.0, float("nan"), 1.0, float("inf"), float("-inf"), 2.0])
    _, (found,) = exact_percentiles([tensor, torch.full((4,), float("nan")), torch.empty(0)], WANTED)
    assert found[0].tolist() == expected(np.array([1.0, 2.0, 3.0]))
    assert found[1:].isnan().all()


def test_other_layouts_count_what_they_stand_for():
    sparse = torch.sparse_coo_tensor([[1, 1, 3]], [2.0, 3.0, -1.0], (200,), check_invariants=True)
    strided = torch.arange(24.0).reshape(4, 6).t()[::2]
    order, (found,) = exact_percentiles([None, sparse, strided, torch.tensor([1 + 2j])], WANTED)
    assert order == [1, 2, 3]
    assert found[0].tolist() == expected(sparse.to_dense().numpy())
    assert found[1].tolist() == expected(strided.numpy())
    assert found[2].tolist() == expected(np.array([1.0, 2.0]))
