"""The direction in which the loss pushes the output."""

from forewarn.lab.networks import MLP
from tests.real_runs import Breakable


def loss_with_the_wrong_sign(run):
    it = Breakable(run)
    it.change_loss = lambda step, loss: -loss
    return it.train(60)


def test_two_classes_do_not_tell_which_is_the_target(tmp_path):
    it = Breakable(tmp_path / "run", MLP([16, 64, 2]))
    it.batches = ((inputs, targets % 2) for inputs, targets in it.batches)
    it.change_loss = lambda step, loss: -loss
    assert not len(it.train(10).history.panel("activation/reversed_rows"))


FAULTS = {"L110": loss_with_the_wrong_sign}
