"""A histogram drawn in characters."""

from __future__ import annotations

import numpy as np

from forewarn.types import Shape
from forewarn.views.bars import ASCII_BARS
from forewarn.views.histogram import ROWS, picture, words
from tests.measure.engine.distributions.made import histogram


def test_a_column_stands_for_a_power_of_two_and_the_left_is_negative():
    counts, zeros = histogram([-4.0] * 8 + [-1.0] * 4 + [0.0] + [1.0] * 2 + [2.0] * 8)
    *bars, axis, told = picture(counts[0], int(zeros[0]))
    heights = [sum(line[at : at + 1].strip() != "" for line in bars) for at in range(7)]
    assert len(bars) == ROWS
    assert heights == [6, 0, 3, 1, 2, 6, 0]
    assert bars[-1] == "█ █▆██"
    assert axis == "-8 0  8"
    assert told == "23 values, 1 of them zero; each column covers one power of two"


def test_what_was_counted_at_all_is_seen():
    counts, zeros = histogram([1.0] * 100_000 + [1e-3])
    assert picture(counts[0], int(zeros[0]))[ROWS - 1].replace(" ", "")[0] == "▁"


def test_a_wide_histogram_fits_the_terminal_and_loses_nothing():
    random = np.random.default_rng(0)
    values = np.exp2(random.uniform(-40, 24, 5000)) * random.choice([-1, 1], 5000)
    counts, zeros = histogram(values)
    for width in (40, 80, 129, 200):
        *bars, axis, told = picture(counts[0], int(zeros[0]), width)
        assert max(map(len, bars)) <= width + 1
        assert len(axis) <= width + 1
        assert told.startswith("5,000 values")
    assert "4 powers of two" in picture(counts[0], 0, 40)[-1]
    assert axis.split("0")[0].strip().startswith("-1.68e+7")


def test_smallest_and_largest_magnitudes_stand_at_the_axis():
    counts, zeros = histogram(np.exp2(np.linspace(-20, 3.5, 500)))
    axis = picture(counts[0], int(zeros[0]))[-2]
    assert axis.split() == ["-16", "-9.54e-7", "0", "9.54e-7", "16"]
    assert axis[24] == "0"
    assert len(axis) == 2 * 24 + 1


def test_nothing_but_zeros_is_one_column():
    counts, zeros = histogram(np.zeros(7))
    assert picture(counts[0], int(zeros[0])) == [
        *["█"] * ROWS,
        "0",
        "7 values, 7 of them zero; each column covers one power of two",
    ]


def test_a_terminal_without_blocks_gets_plain_characters():
    counts, zeros = histogram(np.random.default_rng(0).normal(size=1000))
    assert all(line.isascii() for line in picture(counts[0], int(zeros[0]), bars=ASCII_BARS))


def test_shape_and_percentiles_are_told_and_what_is_unknown_is_not():
    nan = float("nan")
    assert words(float(Shape.SHIFTED), {"min": 0.5, "p50": 1.0, "max": nan}) == [str(Shape.SHIFTED), "min 0.5  p50 1"]
    assert words(nan, {"min": nan}) == []
    assert words(99.0, {}) == []
