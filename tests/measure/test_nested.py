"""One walk over whatever modules take and give, for everybody who looks for tensors in it."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch

from forewarn.measure.nested import nested_tensors

A, B = torch.ones(1), torch.zeros(2)


@dataclass
class Output:
    loss: Any
    logits: Any = None


class Pair(NamedTuple):
    hidden: Any
    cell: Any


class ModelOutput(OrderedDict):
    """As Hugging Face's: a mapping whose items are attributes too, and a dataclass."""

    __dataclass_fields__ = {"logits": None}  # noqa: RUF012 - as theirs


@pytest.mark.parametrize(
    ("value", "places"),
    [
        (A, {"": A}),
        ((A, B), {"[0]": A, "[1]": B}),
        ([A, {"state": B}], {"[0]": A, "[1][state]": B}),
        (Pair(A, (B,)), {"[0]": A, "[1][0]": B}),
        (Output(A, {"b": [B]}), {"[loss]": A, "[logits][b][0]": B}),
        (ModelOutput(logits=A, past=(B,)), {"[logits]": A, "[past][0]": B}),
        ({1: A, (2, 3): B}, {"[1]": A, "[(2, 3)]": B}),
        (("text", None, 3, {A}, b"bytes"), {}),
        (None, {}),
    ],
)
def test_every_tensor_is_found_with_its_place_in_order(value, places):
    walked = list(nested_tensors(value))
    assert [place for place, _ in walked] == list(places)
    assert all(tensor is places[place] for place, tensor in walked)


def test_what_contains_itself_ends_at_the_depth_that_was_asked_for():
    endless: list[Any] = [A]
    endless.append(endless)
    assert [place for place, _ in nested_tensors(endless, max_depth=2)] == ["[0]", "[1][0]"]
    assert list(nested_tensors([A], max_depth=0)) == []
    assert [place for place, _ in nested_tensors(A, max_depth=0)] == [""]
