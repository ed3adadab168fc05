"""A watched loader is the loader in every way but that its waiting is measured."""

import copy
import pickle
from collections.abc import Sized

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from forewarn.measure.loader import watched
from forewarn.measure.stopwatch import Stopwatch


def loader(**options):
    return DataLoader(TensorDataset(torch.arange(10.0)), batch_size=2, shuffle=True, **options)


def numbers(batches):
    return [batch.tolist() for (batch,) in batches]


@pytest.mark.parametrize("workers", [0, 1])
def test_batches_and_random_numbers_are_the_same(workers):
    seen = []
    for wrap in (lambda plain: plain, lambda plain: watched(plain, Stopwatch())):
        torch.manual_seed(3)
        batches = wrap(loader(num_workers=workers))
        seen.append((numbers(batches), numbers(batches), torch.rand(1).item()))
    assert seen[0] == seen[1]


def test_length_type_and_attributes_are_the_loaders():
    plain = loader()
    same = watched(plain, Stopwatch())
    assert len(same) == 5
    assert isinstance(same, DataLoader)
    assert same.batch_size == 2
    assert same.sampler is plain.sampler
    same.mine = 3
    assert plain.mine == 3
    del same.mine
    assert not hasattr(same, "mine")
    with pytest.raises(ValueError, match="batch_size"):
        same.batch_size = 4  # a DataLoader refuses it
    assert repr(same) == repr(plain)
    assert type(copy.copy(same)) is DataLoader
    assert type(pickle.loads(pickle.dumps(same))) is DataLoader


def test_a_position_is_saved_and_loaded():
    class Resumable(list):
        at = 0

        def state_dict(self):
            return {"at": self.at}

        def load_state_dict(self, state):
            self.at = state["at"]

    plain = Resumable([1, 2])
    same = watched(plain, Stopwatch())
    same.load_state_dict({"at": 1})
    assert same.state_dict() == plain.state_dict() == {"at": 1}
    assert list(same) == [1, 2]


def test_a_list_of_batches_can_still_be_indexed_and_searched():
    same = watched(["first", "second"], Stopwatch())
    assert (same[1], same[-2:], "second" in same, "third" in same) == ("second", ["first", "second"], True, False)
    with pytest.raises(TypeError, match="not subscriptable"):
        watched(loader(), Stopwatch())[0]


class Stream(IterableDataset):
    def __iter__(self):
        yield 1.0
        raise KeyError("the file is gone")


def test_exceptions_pass_unchanged():
    batches = iter(watched(DataLoader(Stream(), batch_size=None), Stopwatch()))
    assert next(batches) == 1.0
    with pytest.raises(KeyError, match="the file is gone"):
        next(batches)
    with pytest.raises(TypeError, match="has no len"):
        len(watched(DataLoader(Stream()), Stopwatch()))


def test_a_generator_has_no_length_and_is_its_own_iterator():
    batches = watched((number for number in (1, 2)), Stopwatch())
    assert not isinstance(batches, Sized)
    assert iter(batches) is batches
    assert list(batches) == [1, 2]


def test_only_the_time_inside_next_is_waiting():
    now = [0.0]
    stopwatch = Stopwatch(lambda: now[0])

    def slow():
        for number in range(3):
            now[0] += 5
            yield number

    for _ in watched(slow(), stopwatch):
        now[0] += 1
    stopwatch.end_step()
    assert stopwatch.seconds[0] == 15
