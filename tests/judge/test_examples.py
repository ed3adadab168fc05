"""The shorthand of the examples."""

import math

import numpy as np
import pytest

from forewarn.judge.examples import parse


def values(text):
    return list(parse(f"fires: {text}", "train/loss").series["train/loss", ""])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2.0", [2.0]),
        ("2 3.5 -1e-3", [2.0, 3.5, -0.001]),
        ("2.0x3", [2.0, 2.0, 2.0]),
        ("2.0+0.5x3", [2.0, 2.5, 3.0]),
        ("2.0-0.5x3", [2.0, 1.5, 1.0]),
        ("-1+1x3", [-1.0, 0.0, 1.0]),
        ("1e-9+1e-9x2", [1e-9, 2e-9]),
        ("1 _ 2 _x2", [1.0, None, 2.0, None, None]),
        ("infx2 -inf", [math.inf, math.inf, -math.inf]),
        ("2.0+0.5x1", [2.0]),
        ("7x0 1", [1.0]),
    ],
)
def test_values_are_written_out(text, expected):
    assert values(text) == pytest.approx(expected)


def test_nan_is_a_value_and_not_a_gap():
    (value,) = values("nan")
    assert math.isnan(value)


def test_series_are_named_and_scoped():
    example = parse(
        "quiet: 1x2 | train/lr{0} 0.1 | update/ratio{a.weight} 0.5 | update/ratio{a.bias} 0.6", "train/loss"
    )
    assert not example.fires
    assert list(example.series) == [
        ("train/loss", ""), ("train/lr", "0"), ("update/ratio", "a.weight"), ("update/ratio", "a.bias"),
    ]  # fmt: skip
    (first, blocks), (second, later) = example.steps()
    assert (first, second) == (0, 1)
    assert {block.name: block.scopes for block in blocks}["update/ratio"] == ("a.weight", "a.bias")
    assert [block.name for block in later] == ["train/loss"], "a series that has ended has no reading"
    assert all(block.values.dtype == np.float32 for block in blocks)


def test_scopes_with_a_dot_are_parameters():
    known = parse(
        "fires: update/ratio{a.weight} 1 | update/ratio{a.bias} 1 | train/lr{0} 1", "train/loss"
    ).info.parameters
    assert {name: each.shape for name, each in known.items()} == {"a.weight": (8, 8), "a.bias": (8,)}


@pytest.mark.parametrize("line", [
    "maybe: 1", "fires:", "fires: train/loss", "fires: 1 | 2", "fires: 2.0+0.5", "fires: 2.0y3", "fires: 1,2",
    "fires: one", "fires: _+1x3",
])  # fmt: skip
def test_what_cannot_be_read_says_so(line):
    with pytest.raises(ValueError, match=r"example begins|is no series|is no value"):
        parse(line, "train/loss")
