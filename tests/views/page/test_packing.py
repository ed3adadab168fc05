"""The binary answers, read back as the page reads them."""

import json
import math
import struct

import numpy as np
import pytest

from forewarn.views.page.packing import json_bytes, packed
from tests.page_runs import unpacked


@pytest.mark.parametrize("name", ["a", "ab", "abc", "abcd", "ü"])
def test_the_header_is_padded_and_the_arrays_follow(name):
    body = packed(
        {"name": name}, {"steps": np.array([1, 2**32 - 1]), "values": np.array([[0.5, math.nan], [math.inf, -1]])}
    )
    (size,) = struct.unpack_from("<I", body)
    header = json.loads(body[4 : 4 + size])
    assert size % 4 == 0
    assert header["name"] == name
    assert header["arrays"] == [
        {"name": "steps", "type": "uint32", "length": 2}, {"name": "values", "type": "float32", "length": 4},
    ]  # fmt: skip
    assert struct.unpack_from("<2I", body, 4 + size) == (1, 2**32 - 1)
    assert struct.unpack_from("<4f", body, 12 + size)[2:] == (math.inf, -1.0)
    assert len(body) == 4 + size + 6 * 4


def test_what_was_packed_can_be_unpacked():
    header, arrays = unpacked(packed({"low": math.nan}, {"values": np.arange(3, dtype=np.float32)}))
    assert header["low"] is None
    assert arrays["values"].tolist() == [0, 1, 2]


def test_json_has_null_for_what_is_not_finite():
    assert json.loads(json_bytes({"a": [math.inf, 1.5], "b": (math.nan,)})) == {"a": [None, 1.5], "b": [None]}
