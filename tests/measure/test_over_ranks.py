"""Arrays of several ranks become one: against numpy on the values of all ranks."""

import numpy as np
import pytest

from forewarn.measure.engine import COLUMNS
from forewarn.measure.over_ranks import Entry, How, Part, pack, unpack


def combined(part, arrays, twins=()):
    """What rank 0 gets if the ranks have these arrays."""
    packed = [pack([Entry("key", part, array)], rank, len(arrays), rank in twins) for rank, array in enumerate(arrays)]
    sums, most = (np.array(vectors) for vectors in zip(*packed, strict=True))
    (result,) = unpack([Entry("key", part, arrays[0])], sums.sum(axis=0), most.max(axis=0), len(arrays))
    return result


VALUES = [np.array([1.0, -2.0]), np.array([4.0, 6.0]), np.array([-7.0, 2.0])]


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        (How.SUM, np.sum(VALUES, axis=0)), (How.MEAN, np.mean(VALUES, axis=0)), (How.MIN, np.min(VALUES, axis=0)),
        (How.MAX, np.max(VALUES, axis=0)), (How.L2, np.linalg.norm(VALUES, axis=0)), (How.EACH, np.array(VALUES)),
    ],
)  # fmt: skip
def test_vectors_are_combined_as_they_say(how, expected):
    np.testing.assert_allclose(combined(Part(how), VALUES), expected)


def row(values):
    finite = values[np.isfinite(values)]
    least, most = (finite.min(), finite.max()) if len(finite) else (np.inf, -np.inf)
    zeros, nonfinite = (values == 0).sum(), len(values) - len(finite)
    return [len(values), finite.sum(), np.square(finite).sum(), least, most, zeros, nonfinite]


def test_rows_of_shards_add_up_to_the_row_of_the_whole_tensor():
    whole = np.array([1.5, -3.0, 0.0, np.nan, 2.0, np.inf, 0.25])
    shards = np.split(whole, [3, 5, 5, 7])[:4]  # one of them is empty
    nothing = [np.nan] * len(COLUMNS)
    ranks = [np.array([row(shard), nothing]) for shard in shards]
    ranks[2][0] = np.nan  # a rank that does not read this tensor
    result = combined(Part(How.ROWS), ranks)
    np.testing.assert_allclose(result[0], row(whole))
    assert np.isnan(result[1]).all()  # no rank has read it


def test_only_one_of_the_ranks_with_the_same_batch_counts_its_targets():
    targets = [np.array([8.0, 3.0, 1.0]), np.array([8.0, 3.0, 1.0]), np.array([4.0, 5.0, 2.0])]
    assert combined(Part(How.TARGETS, once=True), targets, twins=(1,)).tolist() == [12.0, 5.0, 1.0]


def test_a_maximum_ignores_what_is_not_a_number_unless_nothing_else_is_there():
    ranks = [np.array([np.nan, np.nan]), np.array([np.nan, -1.0])]
    np.testing.assert_array_equal(combined(Part(How.MAX), ranks), [np.nan, -1.0])
