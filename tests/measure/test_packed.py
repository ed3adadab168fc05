"""Nested values become tensors and JSON, and come back."""

import json
import math
from collections import namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from forewarn.measure.packed import left_out, pack, unpack

Pair = namedtuple("Pair", "inputs targets")


@dataclass
class Batch:
    tokens: torch.Tensor
    length: int


def returned(value):
    packed = pack(value)
    return unpack(json.loads(json.dumps(packed.structure, allow_nan=False)), packed.tensors)


def test_dicts_lists_tuples_and_dataclasses_come_back():
    tensor = torch.arange(3)
    value = {"a": [tensor, (1, 2.5, "x", None, True)], 7: math.inf}
    back = returned(value)
    assert back["a"][0] is not None
    assert torch.equal(back["a"][0], tensor)
    assert back["a"][1] == (1, 2.5, "x", None, True)
    assert back[7] == math.inf
    assert returned(Pair(tensor, 2)).targets == 2
    assert torch.equal(returned(Batch(tensor, 3)).tokens, tensor)
    assert returned(torch.float16) is torch.float16
    assert returned(torch.device("cpu")) == torch.device("cpu")
    assert isinstance(returned(np.ones(2)), np.ndarray)


def test_a_packed_sequence_is_one_again():
    packed = pack_padded_sequence(torch.randn(2, 3, 4), [3, 2], batch_first=True)
    back = returned(packed)
    assert isinstance(back, PackedSequence)
    assert torch.nn.LSTM(4, 5)(back)[0].data.shape == (5, 5)


def test_what_cannot_be_kept_is_named():
    loop = []
    loop.append(loop)
    value = {"graph": object(), "sparse": torch.eye(2).to_sparse(), "loop": loop, "many": [0] * 20_000}
    lines = left_out(pack(value).structure)
    assert lines[0] == "[graph]: object"
    assert lines[1] == "[sparse]: a tensor of the kind sparse_coo"
    assert lines[2].endswith("nested too deeply")
    assert lines[3] == "[many]: more than 10,000 parts"
    assert returned(value)["graph"] is None


def test_tensors_keep_no_graph_alive_and_say_whether_they_needed_one():
    leaf = torch.ones(2, requires_grad=True)
    packed = pack(leaf * 2)
    assert packed.tensors[0].grad_fn is None
    assert unpack(packed.structure, packed.tensors).requires_grad


def test_a_change_in_place_is_noticed_unless_a_copy_was_taken():
    tensor = torch.ones(2)
    kept, copied = pack([tensor]), pack([tensor], copies=True)
    tensor.zero_()
    assert kept.changed == [0]
    assert copied.changed == []
    assert copied.tensors[0].all()


@pytest.mark.parametrize(
    "structure",
    [
        None, [], {}, {"tensor": 1}, {"tensor": -1}, {"tensor": "0"}, {"value": []}, {"evil": 1}, {"dtype": "load"},
        {"dict": [[{"list": []}, {"value": 1}]]}, {"dict": [1]}, {"object": [["__class__ ", {"value": 1}]]},
        {"namedtuple": [["def", {"value": 1}]]}, {"float": "1"}, {"list": 3},
    ],
)  # fmt: skip
def test_a_damaged_structure_is_refused(structure):
    with pytest.raises(ValueError, match="damaged"):
        unpack(structure, [torch.ones(1)])


def test_a_structure_that_is_nested_without_end_is_refused():
    structure = {"value": 1}
    for _ in range(1000):
        structure = {"list": [structure]}
    with pytest.raises(ValueError, match="damaged"):
        unpack(structure, [])
