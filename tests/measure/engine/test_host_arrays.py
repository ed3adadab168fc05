"""Tensors in host memory as arrays."""

import numpy as np
import pytest
import torch
from torch import nn

from forewarn.measure.engine.host_arrays import host_array

BASE = torch.arange(24.0).reshape(2, 3, 4)


@pytest.mark.parametrize(
    "tensor",
    [
        BASE, BASE.permute(2, 0, 1), BASE[:, 1:, ::2], BASE.expand(5, 2, 3, 4), BASE[0, 0, 0], torch.empty(0, 3),
        nn.Parameter(BASE.clone()), BASE.double(), BASE.half(), BASE.long(), BASE.to(torch.int8), BASE > 3,
    ],
)  # fmt: skip
def test_an_array_has_the_values_of_its_tensor(tensor):
    array = host_array(tensor)
    np.testing.assert_array_equal(array, tensor.detach().numpy())
    assert array.dtype == tensor.detach().numpy().dtype
    assert not array.flags.writeable or not array.size


@pytest.mark.parametrize(
    "tensor",
    [
        BASE.bfloat16(), BASE.to("meta"), BASE.to_sparse(), torch._neg_view(BASE), BASE + 1j,
        torch.nested.nested_tensor([BASE[0], BASE[1]], layout=torch.jagged), torch._efficientzerotensor((3,)),
    ],
)  # fmt: skip
def test_what_numpy_cannot_read_has_no_array(tensor):
    assert host_array(tensor) is None


def test_a_tensor_within_a_transform_has_no_array():
    found = []
    torch.vmap(lambda x: found.append(host_array(x)) or x)(BASE)
    assert found == [None]
