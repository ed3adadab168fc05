"""How the loss compares the output with the targets."""

import torch

import forewarn
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


def regression(run, shape):
    torch.manual_seed(0)
    model = MLP([16, 64, 1])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with forewarn.watch(model, optimizer, run, every=5, views=[]) as monitor:
        for _ in range(60):
            inputs = torch.randn(32, 16)
            loss = (model(inputs) - inputs[:, 0].view(shape)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            monitor.step(loss)
    return monitor


def targets_without_the_dimension_of_the_output(run):
    return regression(run, (-1,))


def test_targets_of_the_same_shape_are_quiet(tmp_path):
    assert regression(tmp_path / "run", (-1, 1)).alerts == ()


FAULTS = {"L110": loss_with_the_wrong_sign, "L111": targets_without_the_dimension_of_the_output}
